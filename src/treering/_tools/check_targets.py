"""Finds the checkpoints at a path that a check must read, and those that this process may not read."""

import posixpath
from collections.abc import Collection, Iterator
from typing import NamedTuple

from .. import formats
from .._run import links, run_layout
from .._run.step_fallback import check_exists
from ..errors import NotFoundError
from ..formats.treering import summary
from ..stores.read_errors import UnreadableError, reading
from ..stores.store import Store


class CheckTargets(NamedTuple):
    """The paths to check with their formats, and unreadable paths. A format of None is recognized on opening.

    `archived` are the directories of archived steps; their steps are among the paths. `unfinished` are the paths of
    steps without a manifest, whose save or copy is not complete.
    """

    formats: dict[str, str | None]
    closed: dict[str, PermissionError]
    archived: list[str]
    unfinished: list[str]


def find_check_targets(store: Store, place: str, only: formats.Format | None, prefix: str | None) -> CheckTargets:
    """Returns the checkpoint itself, or the steps of a run, its archived steps and the checkpoints next to them.

    only: ignores other formats.
    prefix: the beginning of the step names.
    """
    with store.glance(place):
        single = summary.stat_manifest(store, place) is not None
        found = CheckTargets({}, {}, [], []) if single else _steps(store, place, only, prefix)
        if not (found.formats or found.closed):
            if prefix is not None:
                raise NotFoundError(f"{place}: expected a run with steps whose names begin with {prefix!r}, found none")
            return CheckTargets({place: None if only is None else check_exists(store, place, only).name}, {}, [], [])
        # The folder of a run may also have the weights that the run began with.
        weights = formats.is_known(store, place) if only is None else formats.accepts(only, store, place)
    given = None if only is None else only.name
    return found._replace(formats={place: given, **found.formats}) if weights else found


def _steps(store: Store, place: str, only: formats.Format | None, prefix: str | None) -> CheckTargets:
    native, foreign = only is None or only.name == "treering", only is None or only.name != "treering"
    names = [name for _, name in run_layout.list_step_names(store, place, prefix)] if native else []
    found: dict[str, str | None] = {posixpath.join(place, name): "treering" for name in names}
    if foreign:
        others = set(formats.foreign_steps(store, place, set(names), only).values())
        known = {posixpath.basename(one.path) for one in others}.union(names)
        # A run ignores a damaged step if it has a valid one of the same number, but it is still damage.
        rest = [name for name in store.list(place) if name not in known]
        others.update(one for _, one in formats.damaged_steps(store, place, rest, only))
        found.update({one.path: one.format for one in sorted(others, key=lambda one: one.path)})
    if native and found and prefix is None:
        found.update(dict.fromkeys(_neighbors(store, place, found), "treering"))
    closed = dict(unreadable_steps(store, place, found))
    archived: list[str] = []
    unfinished: list[str] = []
    if native and found:
        known = {posixpath.basename(path) for path in found}
        names = unfinished_steps(store, place, prefix, known)
        unfinished += [path for name in names if (path := posixpath.join(place, name)) not in closed]
    for folder in run_layout.archived_runs(store, place):
        if folder in closed:
            continue
        try:
            below = _steps(store, folder, only, None)
        except PermissionError as error:
            closed[folder] = error
            continue
        archived += [folder, *below.archived] if below.formats or below.closed else []
        found.update(below.formats)
        closed.update(below.closed)
        unfinished += below.unfinished
    return CheckTargets(found, closed, archived, unfinished)


def unfinished_steps(store: Store, run: str, prefix: str | None, known: Collection[str]) -> list[str]:
    """Returns the names in a run that are those of steps, without the `known` steps."""
    prefix = run_layout.find_prefix(store, run) if prefix is None else prefix
    names = [name for name in sorted(store.list(run)) if name not in known]
    return [name for name in names if run_layout.parse_step_name(name, prefix) is not None]


def _neighbors(store: Store, place: str, steps: Collection[str]) -> Iterator[str]:
    """Yields the native checkpoints next to the steps of a run, such as ``best``. Skips links to steps."""
    linked = {link for names in links.find_links(store, place).values() for link in names}
    for name in sorted(store.list(place)):
        path = posixpath.join(place, name)
        if path in steps or name in linked:
            continue
        try:
            with reading(path):
                is_there = summary.stat_manifest(store, path) is not None
        except PermissionError:  # `unreadable_steps` names it if it may be a step.
            continue
        except UnreadableError:
            is_there = True  # The check reports it as damage.
        if is_there:
            yield path


def unreadable_steps(store: Store, place: str, known: Collection[str]) -> Iterator[tuple[str, PermissionError]]:
    """Yields unreadable paths that may be steps or contain steps: those with a digit, as every step name has one.

    known: the paths of steps that were read.
    """
    for name in store.list(place):
        path = posixpath.join(place, name)
        if path in known or not any(letter.isdigit() for letter in name):
            continue
        try:
            with reading(path):
                summary.stat_manifest(store, path)
                formats.check_open(store, place, name)
        except PermissionError as error:
            yield path, error
        except UnreadableError:  # The check reports it as damage.
            continue
