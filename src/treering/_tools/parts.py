"""The checkpoints at a path that are there to be checked, and what this process may not look into."""

import posixpath
from collections.abc import Collection, Iterator
from typing import NamedTuple

from .. import formats
from .._run import links, run
from .._run.latest_good import check_there
from ..errors import NotFoundError
from ..formats.treering import summary
from ..stores.read_errors import UnreadableError, reading
from ..stores.store import Store


class Parts(NamedTuple):
    """The paths to check, with their formats (None: it is recognized when it is opened), and those that are closed.

    `archived` are the directories of archived steps, whose steps are among the paths.
    """

    formats: dict[str, str | None]
    closed: dict[str, PermissionError]
    archived: list[str]


def parts_of(store: Store, place: str, only: formats.Format | None, prefix: str | None) -> Parts:
    """Returns the parts of a checkpoint (itself) or of a run (its steps, archived ones too, and what lies beside).

    only: the format that counts. prefix: of the names of the run's steps.
    """
    with store.glance(place):
        single = summary.look(store, place) is not None
        found = Parts({}, {}, []) if single else _steps(store, place, only, prefix)
        if not (found.formats or found.closed):
            if prefix is not None:
                raise NotFoundError(f"{place}: expected a run with steps whose names begin with {prefix!r}, found none")
            return Parts({place: None if only is None else check_there(store, place, only).name}, {}, [])
        # Beside the steps of a run may lie the weights that it began with.
        weights = formats.is_known(store, place) if only is None else formats.accepts(only, store, place)
    given = None if only is None else only.name
    return found._replace(formats={place: given, **found.formats}) if weights else found


def _steps(store: Store, place: str, only: formats.Format | None, prefix: str | None) -> Parts:
    native, foreign = only is None or only.name == "treering", only is None or only.name != "treering"
    names = [name for _, name in run.directories(store, place, prefix)] if native else []
    found: dict[str, str | None] = {posixpath.join(place, name): "treering" for name in names}
    if foreign:
        others = set(formats.foreign_steps(store, place, set(names), only).values())
        known = {posixpath.basename(one.path) for one in others}.union(names)
        # A damaged step beside a good one of the same number does not count, but it is still damage.
        rest = [name for name in store.list(place) if name not in known]
        others.update(one for _, one in formats.damaged_steps(store, place, rest, only))
        found.update({one.path: one.format for one in sorted(others, key=lambda one: one.path)})
    if native and found and prefix is None:
        found.update(dict.fromkeys(_beside(store, place, found), "treering"))
    closed = dict(closed_in(store, place, found))
    archived: list[str] = []
    for aside in run.aside(store, place):
        if aside in closed:
            continue
        try:
            below = _steps(store, aside, only, None)
        except PermissionError as error:
            closed[aside] = error
            continue
        archived += [aside, *below.archived] if below.formats or below.closed else []
        found.update(below.formats)
        closed.update(below.closed)
    return Parts(found, closed, archived)


def _beside(store: Store, place: str, steps: Collection[str]) -> Iterator[str]:
    """Yields the native checkpoints beside the steps of a run, such as ``best``; links to steps are none."""
    linked = {link for names in links.to_steps(store, place).values() for link in names}
    for name in sorted(store.list(place)):
        path = posixpath.join(place, name)
        if path in steps or name in linked:
            continue
        try:
            with reading(path):
                there = summary.look(store, path) is not None
        except PermissionError:  # closed_in names what may be a step
            continue
        except UnreadableError:
            there = True  # it is damage, and found as such
        if there:
            yield path


def closed_in(store: Store, place: str, known: Collection[str]) -> Iterator[tuple[str, PermissionError]]:
    """Yields what may be steps, or hold them, and may not be looked into: every name of a step has a number.

    known: paths of steps that were looked into.
    """
    for name in store.list(place):
        path = posixpath.join(place, name)
        if path in known or not any(letter.isdigit() for letter in name):
            continue
        try:
            with reading(path):
                summary.look(store, path)
                formats.check_open(store, place, name)
        except PermissionError as error:
            yield path, error
        except UnreadableError:  # which is damage, and found as such
            continue
