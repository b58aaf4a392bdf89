"""The layout of a run: a directory with one checkpoint per step, archived runs and marks."""

import contextlib
import dataclasses
import logging
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .. import formats, stores
from .._core.leaf_paths import join_names
from .._core.tracebacks import hide_internal_frames
from .._core.values import MAX_EXACT_INT as MAX_STEP
from ..errors import MismatchError, TreeringError
from ..formats.treering import summary
from ..stores import nfs, owners
from ..stores.file_io import is_folder, make_empty
from ..stores.read_errors import UnreadableError, reading
from ..stores.store import Store
from . import links

_log = logging.getLogger("treering")
DEFAULT_PREFIX = "step-"  # of the names of a run's steps, unless `prefix=` gives another
_ANY_STEP_NAME = re.compile(r"(.*[^0-9])([0-9]{8,})", re.DOTALL)
_SHORT_STEP_NAME = re.compile(r"((?:.+_)?)([0-9]+)", re.DOTALL)  # a step's name in a run that Orbax began
FINISHED_MARK = "finished"  # an empty file in the run's directory: no more steps will come
GENERATIONS = "generations.json"  # a file in the remote tier: see `tiers.journal`
JOURNAL = "journal.json"  # a file in the local tier: see `tiers.journal`
ARCHIVE_NAME = re.compile(r"rewound-(\d+)")  # an archived run: a directory of steps of an abandoned branch
BEFORE_FIRST_STEP = -1  # the number before every step, to which `rewind(None)` goes back
MIN_STEP_DIGITS = 8  # of a step in a name; shorter numbers are padded with zeros


@dataclasses.dataclass(frozen=True)
class RunLayout:
    """Says how a run names and writes its steps.

    format, format_options: of new steps, as for `treering.save`.
    shared_with_orbax: True if steps in the format of Orbax belong to the run. Retention counts and deletes them.
    deleted_to: a directory within the run, to which steps are moved instead of being deleted.
    removes_unfinished: True to remove the directories of unfinished saves of Orbax, too.
    """

    prefix: str = DEFAULT_PREFIX
    min_digits: int = MIN_STEP_DIGITS
    format: str = "treering"
    format_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shared_with_orbax: bool = False
    deleted_to: str | None = None
    removes_unfinished: bool = False

    @property
    def foreign_prefix(self) -> str | None:
        """The prefix of the steps of other libraries; None for any."""
        return self.prefix if self.shared_with_orbax else None

    def step_name(self, step: int) -> str:
        """Returns the name of a step's directory: ``step-00001000``."""
        return f"{self.prefix}{step:0{self.min_digits}}"


def parse_step_name(name: str, prefix: str) -> int | None:
    """Returns the step in a directory's name; None if the name does not have this prefix."""
    digits = name.removeprefix(prefix)
    if not (name.startswith(prefix) and digits.isascii() and digits.isdecimal()):
        return None
    return step if (step := int(digits)) <= MAX_STEP else None


def list_step_names(store: Store, run: str, prefix: str | None = None) -> list[tuple[int, str]]:
    """Returns the committed steps of a run, ascending, and the names of their directories.

    A directory is a committed step if its name is the prefix and digits, and it holds a manifest. The default prefix
    is ``step-``; if no step has it, the text before the eight or more digits of all names. If there are no such names
    either, the names of steps are those of Orbax, ``3``, or ``ckpt_3`` if all have that prefix; the checkpoints must
    have been saved as steps with their numbers. A directory that cannot be read is ignored.

    Raises `MismatchError` if the long names have several prefixes.
    """
    with store.glance(run):
        return _list_step_names(store, run, prefix)


def _list_step_names(store: Store, run: str, prefix: str | None) -> list[tuple[int, str]]:
    with reading(run):
        names = store.list(run)
    if prefix is not None:
        return _filter_committed(store, run, names, prefix)
    if found := _filter_committed(store, run, names, DEFAULT_PREFIX):
        return found
    others = {
        match[1] for name in names if (match := _ANY_STEP_NAME.fullmatch(name)) and is_committed(store, run, name)
    }
    if len(others) > 1:
        raise MismatchError(
            f"{run}: expected steps whose names begin with {DEFAULT_PREFIX!r}, found several other prefixes: "
            f"{join_names(tuple(sorted(others)))}; open a step by its own path, or pass prefix= to Checkpointer"
        )
    if others:
        return _filter_committed(store, run, names, others.pop())
    return _short_named_steps(store, run, names)


def _short_named_steps(store: Store, run: str, names: Sequence[str]) -> list[tuple[int, str]]:
    """Returns the steps with names as Orbax gives them. Separate checkpoints may have such names, too.

    Then the names have several prefixes, or the manifests have other steps. If the system cannot look up a manifest,
    the directory is left out: it may be a step of another library, which gives such names, too.
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        if match := _SHORT_STEP_NAME.fullmatch(name):
            path = posixpath.join(run, name)
            with contextlib.suppress(UnreadableError, PermissionError), reading(path):
                if (manifest := summary.stat_manifest(store, path)) and manifest.is_file:
                    found.setdefault(match[1], []).append((int(match[2]), name))
    steps = sorted(found.get("") or (next(iter(found.values())) if len(found) == 1 else []))
    for step, name in reversed(steps):  # The newest one that can be read decides.
        if (known := summary.is_step(store, posixpath.join(run, name), step)) is not None:
            return steps if known else []
    return steps


def find_prefix(store: Store, run: str) -> str:
    """Returns the text before the numbers in the names of a run's steps; see `list_step_names`."""
    found = list_step_names(store, run)
    return found[0][1].rstrip("0123456789") if found else DEFAULT_PREFIX


def _filter_committed(store: Store, run: str, names: Sequence[str], prefix: str) -> list[tuple[int, str]]:
    found = ((step, name) for name in names if (step := parse_step_name(name, prefix)) is not None)
    return sorted((step, name) for step, name in found if is_committed(store, run, name))


def is_committed(store: Store, run: str, name: str) -> bool:
    """Returns True if a directory has a manifest. A directory that cannot be read is ignored, which is logged once."""
    path = posixpath.join(run, name)
    try:
        with reading(path):
            found = summary.stat_manifest(store, path)
    except UnreadableError:
        return True  # A damaged step: opening it reports the damage.
    except PermissionError as error:
        nfs.warn_unlistable(path, error.strerror)
        return False
    return found is not None and found.is_file


def committed_names(store: Store, run: str, prefix: str | None = None) -> dict[int, str]:
    """Returns the committed steps and the names of their directories. Raises `MismatchError` if two claim one step."""
    found = list_step_names(store, run, prefix)
    steps = dict(found)
    if len(steps) != len(found):
        step, name = next((step, name) for step, name in found if steps[step] != name)
        raise MismatchError(
            f"{run}: {name} and {steps[step]} both claim step {step}; open them by their own paths, or keep runs apart"
        )
    return steps


def all_steps(store: Store, run: str, prefix: str | None = None) -> dict[int, str]:
    """Returns the committed steps, ascending, and their paths; see `located_steps`."""
    return {step: one.path for step, one in located_steps(store, run, prefix).items()}


def located_steps(
    store: Store,
    run: str,
    prefix: str | None = None,
    only: formats.Format | None = None,
    foreign_prefix: str | None = None,
) -> dict[int, formats.StepPath]:
    """Returns the committed steps, ascending, with those that other libraries have left in the directory.

    If both have a step, Treering's is returned. only: returns just the steps of this format. foreign_prefix: returns
    just the steps of other libraries whose names have this prefix.
    """
    with store.glance(run):
        names = committed_names(store, run, prefix)
        own = {step: formats.StepPath(posixpath.join(run, name)) for step, name in names.items()}
        if only is not None and only.name == "treering":
            return own
        foreign = formats.foreign_steps(store, run, set(names.values()), only, foreign_prefix)
        return dict(sorted({**foreign, **({} if only else own)}.items()))


@hide_internal_frames
def steps(run: str | os.PathLike[str]) -> list[int]:
    """Returns the committed steps of a run, ascending, whichever library wrote them; none if there is no such run.

    Raises `UnsupportedError` for a run on a web server, which cannot be listed.

    >>> tr.steps("runs/gpt")
    [1000, 2000]
    """
    place = stores.absolute_run(run)
    store = stores.get(place)
    with store.glance(place):
        own = list_step_names(store, place)
        foreign = formats.foreign_steps(store, place, {name for _, name in own})
    return sorted({step for step, _ in own} | set(foreign))


def check_step_readable(store: Store, path: str, error_type: type[TreeringError]) -> None:
    """Raises an error of `error_type` for a directory that has a step's name and cannot be read."""
    try:
        summary.stat_manifest(store, path)
    except PermissionError as error:
        raise error_type(
            f"{path}: expected a step, found a directory that cannot be looked into ({error.strerror}"
            f"{owners.described(path)}), and may be the latest step; make it readable, or use another run"
        ) from error


def archive_steps(store: Store, run: str, paths: Sequence[str]) -> str:
    """Archives step directories: moves them into a new directory ``rewound-N`` within the run, and returns that.

    Pass the newest first. Then the remaining steps are, at every moment and so after a crash, ones that the run had
    earlier. Links in the run to a moved step are logged, because they lead nowhere from now on.
    """
    linked = links.find_links(store, run)
    taken = (int(match[1]) for name in store.list(run) if (match := ARCHIVE_NAME.fullmatch(name)))
    place = posixpath.join(run, f"rewound-{max(taken, default=0) + 1}")
    store.make_folder(place)
    store.settle(run)
    for path in paths:
        name = os.path.basename(path)
        # A bucket copies the manifest last and removes it first: a folder with a manifest is always complete.
        store.move(path, posixpath.join(place, name), last=summary.manifest_path(""))
        if name in linked:
            _log.warning("%s: %s to %s, which was archived in %s", run, links.describe_links(linked[name]), name, place)
    store.settle(place)
    store.settle(run)
    return place


def archived_runs(store: Store, run: str) -> list[str]:
    """Returns the directories of archived runs. A file or a link with such a name is not Treering's."""
    places = [posixpath.join(run, name) for name in store.list(run) if ARCHIVE_NAME.fullmatch(name)]
    return [place for place in places if is_folder(store, place)]


def sync_archived(store: Store, run: str) -> None:
    """Makes durable the steps that a killed job has archived, and removes archive directories that are still empty."""
    places = archived_runs(store, run)
    for place in places:
        if store.list(place):
            store.settle(place)
        else:
            store.remove_folder(place)
    if places:
        store.settle(run)


def mark_finished(store: Store, run: str) -> None:
    """Marks the run durably as finished: no step is added any more."""
    with contextlib.suppress(FileExistsError):
        make_empty(store, posixpath.join(run, FINISHED_MARK))
    store.settle(run)
