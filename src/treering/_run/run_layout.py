"""The layout of a run: a directory with one checkpoint per step, archived runs, marks, and links to its steps."""

import contextlib
import dataclasses
import functools
import logging
import os
import posixpath
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

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

T = TypeVar("T")
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
        return list(_newest_first(store, run, prefix))[::-1]


def _newest_first(store: Store, run: str, prefix: str | None) -> Iterator[tuple[int, str]]:
    with reading(run):
        names = store.list(run)
    is_step = functools.cache(functools.partial(is_committed, store, run))
    return (named for named in reversed(_candidates(store, run, names, prefix, is_step)) if is_step(named[1]))


def _candidates(
    store: Store, run: str, names: Sequence[str], prefix: str | None, is_step: Callable[[str], bool]
) -> list[tuple[int, str]]:
    """Returns the names that the steps of a run have, ascending; see `list_step_names`. Few of them are looked at."""
    found = _named_steps(names, DEFAULT_PREFIX if prefix is None else prefix)
    if prefix is not None or any(is_step(name) for _, name in reversed(found)):
        return found
    others = _runs_of(_ANY_STEP_NAME, names, is_step)
    if len(others) > 1:
        raise MismatchError(
            f"{run}: expected steps whose names begin with {DEFAULT_PREFIX!r}, found several other prefixes: "
            f"{join_names(tuple(sorted(others)))}; open a step by its own path, or pass prefix= to Checkpointer"
        )
    if others:
        return _named_steps(names, *others)
    return _short_named_steps(store, run, names)


def _runs_of(
    pattern: re.Pattern[str], names: Sequence[str], is_step: Callable[[str], bool]
) -> dict[str, list[tuple[int, str]]]:
    """Returns the names with each prefix that one of the steps has, ascending. Looks at the newest names first."""
    runs: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            runs.setdefault(match[1], []).append((int(match[2]), name))
    ordered = {prefix: sorted(run) for prefix, run in runs.items()}
    return {prefix: run for prefix, run in ordered.items() if any(is_step(name) for _, name in reversed(run))}


def _short_named_steps(store: Store, run: str, names: Sequence[str]) -> list[tuple[int, str]]:
    """Returns the names of steps, as Orbax gives them. Separate checkpoints may have such names, too.

    Then the names have several prefixes, or the manifests have other steps. A manifest that the system cannot look up
    decides nothing: the directory may be a step of another library, which gives such names, too.
    """

    def has_manifest(name: str) -> bool:
        path = posixpath.join(run, name)
        with contextlib.suppress(UnreadableError, PermissionError), reading(path):
            return bool((found := summary.stat_manifest(store, path)) and found.is_file)
        return False

    found = _runs_of(_SHORT_STEP_NAME, names, has_manifest)
    steps = found.get("") or (next(iter(found.values())) if len(found) == 1 else [])
    for step, name in reversed(steps):  # The newest one that can be read decides.
        if has_manifest(name) and (known := summary.is_step(store, posixpath.join(run, name), step)) is not None:
            return steps if known else []
    return steps


def find_prefix(store: Store, run: str) -> str:
    """Returns the text before the numbers in the names of a run's steps; see `list_step_names`."""
    with store.glance(run):
        _, newest = next(_newest_first(store, run, None), (0, DEFAULT_PREFIX))
    return newest.rstrip("0123456789")


def _named_steps(names: Sequence[str], prefix: str) -> list[tuple[int, str]]:
    """Returns the names that are those of steps, ascending. Nothing is looked at."""
    return sorted((step, name) for name in names if (step := parse_step_name(name, prefix)) is not None)


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


class Steps(Mapping[int, T]):
    """The committed steps of a run, ascending, and what `made` makes of the names of their directories.

    It lists the run once. Whether a name in the list is that of a committed step is looked up on request, and
    remembered. So one step, the newest, and the steps after another are found at the same cost in a run of any length;
    only iteration looks at all. A store without folders answers from one listing, and is asked at once.

    others: returns the steps of other libraries among the names that are not given; None to leave them out. If both
        have a step, Treering's counts.
    committed: the names of directories that the caller knows to be committed steps, if they are in the listing.
    foreign: the names of those that it knows to be steps of other libraries.

    Raises `MismatchError` if two names claim one step.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        prefix: str | None,
        made: Callable[[str], T],
        others: Callable[[Container[str]], Mapping[int, T]] | None = None,
        committed: Container[str] = (),
        foreign: Container[str] = (),
    ):
        self._store, self._run, self._made, self._others = store, run, made, others
        with store.glance(run):
            with reading(run):
                names = [name for name in store.list(run) if name not in foreign]
            self._looked = {name: True for name in names if name in committed}
            self._names: dict[int, str] = {}
            for step, name in _candidates(store, run, names, prefix, self._is_committed):
                other = self._names.get(step)
                if other is not None and self._is_committed(other):
                    if self._is_committed(name):
                        raise MismatchError(
                            f"{run}: {other} and {name} both claim step {step}; open them by their own paths, or keep "
                            "runs apart"
                        )
                else:
                    self._names[step] = name
            if not store.has_folders:
                len(self)

    @property
    def listed(self) -> Mapping[int, str]:
        """The steps in the listing, and the names of their directories. Some may not be committed."""
        return self._names

    @property
    def looked_at(self) -> tuple[dict[int, T], dict[int, T]]:
        """The committed steps that were looked at so far: Treering's, and those of other libraries."""
        own = {step: self._made(name) for step, name in self._names.items() if self._looked.get(name)}
        complete: Mapping[int, T] = self.__dict__.get("_complete", {})
        return own, {step: made for step, made in complete.items() if step not in own}

    def _is_committed(self, name: str) -> bool:
        if name not in self._looked:
            self._looked[name] = is_committed(self._store, self._run, name)
        return self._looked[name]

    def _has(self, step: int) -> bool:
        return step in self._names and self._is_committed(self._names[step])

    @functools.cached_property
    def _complete(self) -> dict[int, T]:
        own = {step: name for step, name in self._names.items() if self._is_committed(name)}
        found = {step: self._made(name) for step, name in own.items()}
        if not self._others:
            return found
        return dict(sorted({**self._others(set(own.values())), **found}.items()))

    def _other_steps(self, is_asked: Callable[[int], bool]) -> bool:
        """Returns True if another library has a step that is asked for, without a look at those that are not."""
        if not self._others or "_complete" in self.__dict__:
            return self._others is not None
        passed = {name for step, name in self._names.items() if not is_asked(step) or self._looked.get(name)}
        return any(map(is_asked, self._others(passed)))

    def __getitem__(self, step: int) -> T:
        if self._has(step):
            return self._made(self._names[step])
        # A name that is not Treering's may be another library's, which may judge it by the names around it.
        if self._others and (step in self._names or self._other_steps(lambda one: one == step)):
            return self._complete[step]
        raise KeyError(step)

    def __iter__(self) -> Iterator[int]:
        return iter(self._complete)

    def __len__(self) -> int:
        return len(self._complete)

    def __reversed__(self) -> Iterator[int]:
        if (newest := self.newest) is not None:
            yield newest
            yield from (step for step in reversed(self._complete) if step < newest)

    def __bool__(self) -> bool:
        return self.newest is not None

    @functools.cached_property
    def newest(self) -> int | None:
        """The number of the newest step; None without steps."""
        own = next((step for step in reversed(self._names) if self._has(step)), None)
        if own is None or self._other_steps(lambda one: one > own):
            return max(self._complete, default=None)
        return own

    def after(self, step: int) -> dict[int, T]:
        """Returns the steps after one."""
        later = [one for one in self._names if one > step]
        if self._other_steps(lambda one: one > step):
            return {one: made for one, made in self._complete.items() if one > step}
        return {one: self._made(self._names[one]) for one in later if self._has(one)}


def own_steps(store: Store, run: str, prefix: str | None = None) -> Steps[str]:
    """Returns the committed steps that Treering wrote, and the names of their directories."""
    return Steps(store, run, prefix, str)


def all_steps(store: Store, run: str, prefix: str | None = None, foreign_prefix: str | None = None) -> Steps[str]:
    """Returns the committed steps, ascending, and their paths; see `located_steps`."""

    def others(ours: Container[str]) -> dict[int, str]:
        return {step: one.path for step, one in formats.foreign_steps(store, run, ours, None, foreign_prefix).items()}

    return Steps(store, run, prefix, functools.partial(posixpath.join, run), others)


@overload
def located_steps(
    store: Store,
    run: str,
    prefix: str | None = None,
    only: None = None,
    foreign_prefix: str | None = None,
    committed: Container[str] = (),
    foreign: Mapping[int, formats.StepPath] | None = None,
) -> Steps[formats.StepPath]: ...
@overload
def located_steps(
    store: Store,
    run: str,
    prefix: str | None = None,
    only: formats.Format | None = None,
    foreign_prefix: str | None = None,
    committed: Container[str] = (),
    foreign: Mapping[int, formats.StepPath] | None = None,
) -> Steps[formats.StepPath] | dict[int, formats.StepPath]: ...
def located_steps(
    store: Store,
    run: str,
    prefix: str | None = None,
    only: formats.Format | None = None,
    foreign_prefix: str | None = None,
    committed: Container[str] = (),
    foreign: Mapping[int, formats.StepPath] | None = None,
) -> Steps[formats.StepPath] | dict[int, formats.StepPath]:
    """Returns the committed steps, ascending, with those that other libraries have left in the directory.

    If both have a step, Treering's is returned. only: returns just the steps of this format. foreign_prefix: returns
    just the steps of other libraries whose names have this prefix. committed: as for `Steps`. foreign: the steps of
    other libraries that the caller knows.
    """

    def others(ours: Container[str]) -> dict[int, formats.StepPath]:
        return formats.foreign_steps(store, run, ours, only, foreign_prefix, foreign)

    made = lambda name: formats.StepPath(posixpath.join(run, name))  # noqa: E731
    if only is None:
        names = {posixpath.basename(one.path) for one in (foreign or {}).values()}
        return Steps(store, run, prefix, made, others, committed, names)
    if only.name == "treering":
        return Steps(store, run, prefix, made)
    with store.glance(run):
        return dict(sorted(others(set(own_steps(store, run, prefix).values())).items()))


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
    linked = find_links(store, run)
    taken = (int(match[1]) for name in store.list(run) if (match := ARCHIVE_NAME.fullmatch(name)))
    place = posixpath.join(run, f"rewound-{max(taken, default=0) + 1}")
    store.make_folder(place)
    store.settle(run)
    for path in paths:
        name = os.path.basename(path)
        # A bucket copies the manifest last and removes it first: a folder with a manifest is always complete.
        store.move(path, posixpath.join(place, name), last=summary.manifest_path(""))
        if name in linked:
            _log.warning("%s: %s to %s, which was archived in %s", run, describe_links(linked[name]), name, place)
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


def find_links(store: Store, run: str) -> dict[str, tuple[str, ...]]:
    """Returns the names in a run's directory that links in it lead to or into, and the names of these links."""
    if not store.has_folders:  # Buckets have no links, and listing one costs a request.
        return {}
    found: dict[str, tuple[str, ...]] = {}
    links = [name for name in store.list(run) if store.is_link(posixpath.join(run, name))]
    root = store.real_path(run) if links else run
    for link in links:
        target = os.path.relpath(store.real_path(posixpath.join(run, link)), root).split(os.sep)[0]
        if target not in (os.curdir, os.pardir):
            found[target] = (*found.get(target, ()), link)
    return found


def check_not_linked(store: Store, path: str) -> None:
    """Raises `MismatchError` for a step that a link in its run leads to."""
    run, name = posixpath.split(path)
    if found := find_links(store, run).get(name):
        raise MismatchError(f"{path}: {describe_links(found)} to this step, so it stays; remove the link first")


def describe_links(links: tuple[str, ...]) -> str:
    """Returns the beginning of a message about links: ``the link best leads``."""
    return f"the link {links[0]} leads" if len(links) == 1 else f"the links {', '.join(links)} lead"
