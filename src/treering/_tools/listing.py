"""Lists the steps of a run with their states, and marks those that a policy would delete."""

import contextvars
import dataclasses
import functools
import logging
import os
import posixpath
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Literal

from .. import formats, stores
from .._core.leaf_paths import join_names, name_known
from .._run import new_run
from .._run import run_layout as _run
from .._run.step_catalog import StepCatalog, unwanted_emptied
from .._run.step_fallback import open_in_store
from .._threads.pool import in_parallel
from ..errors import MismatchError, NotFoundError, TreeringError, UnsupportedError
from ..formats.treering import pins, removal, summary
from ..keep import Policy, Saved, with_bases
from ..stores import probe
from ..stores.file_io import is_folder
from ..stores.read_errors import UnreadableError, raise_if_momentary, reading
from ..stores.store import Store
from .check import unreadable_steps

_log = logging.getLogger("treering")
_REQUESTS = 10  # of manifests at a time
SYSTEM_FOLDER = "lost+found"  # The file system's own folder, which only root may read.
State = Literal["good", "damaged", "unsupported", "unfinished", "closed", "gone"]


class DiskUsage:
    """Adds up the sizes of files. A file that several steps share by hard links counts once, where it is met first.

    closed: the paths that this process may not read.
    """

    def __init__(self, store: Store):
        self.closed: list[str] = []
        self._store = store
        self._counted: set[Hashable] = set()

    def count(self, path: str) -> int:
        """Returns the bytes of a file, or of all files in a directory, that are not counted yet."""
        store = self._store
        try:
            found = store.stat(path)
            if found is not None and found.is_file:
                return found.nbytes if self._is_new(found.version) else 0
            if (found is not None and not found.is_folder) or store.is_link(path):
                return 0
            names = store.list(path)
        except PermissionError:
            self.closed.append(path)
            return 0
        return sum(self.count(posixpath.join(path, name)) for name in names)

    def _is_new(self, version: Hashable) -> bool:
        if self._store.sharing != "links":  # Elsewhere equal versions are equal contents, not one file.
            return True
        is_new = version not in self._counted
        self._counted.add(version)
        return is_new


def freed_bytes(store: Store, going: Sequence[str], staying: Iterable[str]) -> int | None:
    """Returns the bytes that deleting `going` frees: without the files that `staying` shares.

    Returns None if a part may not be read, and where files are never shared: in buckets each size takes a request.
    """
    if store.sharing != "links":
        return None
    usage = DiskUsage(store)
    for path in staying:
        usage.count(path)
    nbytes = sum(usage.count(path) for path in going)
    return None if usage.closed else nbytes


def size_or_none(store: Store, path: str) -> int | None:
    """Returns the bytes of a file or directory; None if this process may not read a part."""
    usage = DiskUsage(store)
    nbytes = usage.count(path)
    return None if usage.closed else nbytes


@dataclasses.dataclass(frozen=True)
class Row:
    """A step of a run. `created` is in seconds since the epoch, `nbytes` the size of its files; None if unknown.

    `state` is "unfinished" for a directory without a manifest: its save is running, or was killed. The next job removes
    it then.
    """

    step: int
    path: str
    state: State
    format: str = "treering"
    created: float | None = None
    nbytes: int | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    pinned: bool = False
    link: bool = False
    linked_by: tuple[str, ...] = ()  # The links in the run that lead to this step. A linked step stays.
    base: int | None = None  # the step that some of its arrays are stored as differences to
    changed: float | None = None  # of a published version with a base, the share of the elements that changed
    seconds: float | None = None  # of a published version, from the call to the commit
    deleted: bool = False  # True if the policy would delete it.
    emptied: Saved | None = None  # what a damaged step was if only its manifest is left
    saved: Saved | None = None  # what policies see of a valid step


@dataclasses.dataclass(frozen=True)
class Listing:
    """The steps of a run, ascending. `archived` are the directories of steps that a `rewind` archived.

    `not_listed` are the names of other checkpoints in the directory, such as steps whose names begin otherwise.
    `closed` are paths without a row that may be steps or contain steps, and that this process may not read. `tier` is
    "local" or "remote" in a run with a local tier; `survives` says what the copies there survive.
    """

    path: str
    rows: tuple[Row, ...]
    archived: tuple[str, ...]
    finished: bool
    closed: tuple[str, ...] = ()
    tier: Literal["local", "remote"] | None = None
    survives: str | None = None
    not_listed: tuple[str, ...] = ()

    @functools.cached_property  # asked for each row
    def latest(self) -> int | None:
        """The newest valid step."""
        return max((row.step for row in self.rows if row.state == "good"), default=None)


def list_run(
    path: str | os.PathLike[str],
    keep: Policy | None = None,
    prefix: str | None = None,
    inspect: Callable[[Row], State] = lambda row: row.state,
) -> Listing:
    """Lists a run. With `keep`, marks the steps that this policy would delete. Reads manifests, not arrays.

    prefix: the beginning of the step names; by default found from the steps.
    inspect: returns the state of a step after a closer look. If any step would be deleted, it is called for the newest
        valid step, then for older ones until it returns "good".

    Raises `NotFoundError` if the path is not a run, and `MismatchError` if the steps have several prefixes.
    """
    place = stores.absolute(path)
    store = stores.get(place)
    is_chosen = prefix is not None
    with store.glance(place):
        check_run(store, place, prefix)
        prefix = prefix if prefix is not None else _run.find_prefix(store, place)
        steps = StepCatalog(store, place, _run.RunLayout(prefix))
        own = steps.committed()
        names = {os.path.basename(one) for one in own.values()}
        rows = _native_rows(steps, own)
        others = formats.foreign_steps(store, place, names)
        rows += [_foreign_row(store, step, *one) for step, one in others.items() if step not in own]
        known = {row.step for row in rows}
        for name in store.list(place):
            step = _run.parse_step_name(name, prefix)
            if step is not None and step not in known:
                rows.append(_uncommitted_row(store, step, posixpath.join(place, name)))
        rows.sort(key=lambda row: row.step)
        closed = tuple(path for path, _ in unreadable_steps(store, place, {row.path for row in rows}))
        archived = tuple(_run.archived_runs(store, place))
        finished = store.stat(posixpath.join(place, _run.FINISHED_MARK)) is not None
        tier = _tier(store, place)
        known_names = {os.path.basename(row.path) for row in rows}
        not_listed = () if is_chosen else tuple(new_run.other_checkpoints(store, place, known_names))
        if linked := _run.find_links(store, place):
            rows = [dataclasses.replace(row, linked_by=linked.get(os.path.basename(row.path), ())) for row in rows]
    if keep:
        for n in reversed(range(len(rows))):
            if rows[n].state != "good":
                continue
            if all(row.linked_by for row in _rows_to_delete(keep, rows)):
                break
            rows[n] = dataclasses.replace(rows[n], state=inspect(rows[n]))
            if rows[n].state == "good":
                break
        rows = _mark_deleted(store, place, keep, rows)
        if not_listed:
            _log.warning("%s: these checkpoints have other names and stay: %s", place, join_names(not_listed))
    survives = probe.survives(store, place) if tier else None
    return Listing(place, tuple(rows), archived, finished, closed, tier, survives, not_listed)


def _tier(store: Store, place: str) -> Literal["local", "remote"] | None:
    """Returns which tier of a run a directory is; None in a run that never had a local tier."""
    if store.stat(posixpath.join(place, _run.JOURNAL)) is not None:
        return "local"
    return "remote" if store.stat(posixpath.join(place, _run.GENERATIONS)) is not None else None


def is_run(store: Store, place: str, prefix: str | None = None) -> bool:
    """Returns True if a directory has steps, or leftovers of a save.

    Raises `PermissionError` if this process may not read the directory, and `MismatchError` if the steps have several
    prefixes.
    """
    with reading(place):
        if summary.stat_manifest(store, place):
            return False
        names = store.list(place)
        steps = any(
            _run.parse_step_name(name, _run.DEFAULT_PREFIX if prefix is None else prefix) is not None for name in names
        )
        return steps or bool(_run.all_steps(store, place, prefix))


def is_empty_run(store: Store, place: str) -> bool:
    """Returns True if a path that the user calls a run is a finished run without steps.

    Searches for runs do not use it, because any folder may have a file called `finished`.
    """
    with reading(place):
        found = _run.FINISHED_MARK in store.list(place)
    return found and not formats.is_known(store, place) and not runs_in(store, place)


def check_run(store: Store, place: str, prefix: str | None = None) -> None:
    """Raises `NotFoundError` if a path is not a directory with steps or leftovers of a save, nor a finished run."""
    if is_run(store, place, prefix) or is_empty_run(store, place):
        return
    with reading(place):
        names, there = store.list(place), store.stat(place)
        if not names and there is None:
            meant = new_run.suggest_path(store, place) or new_run.suggest_run(store, place)
            raise NotFoundError(f"{place}: expected a run, found nothing{meant}")
        if formats.is_known(store, place):
            found = "expected a run, found one checkpoint"
        elif names:
            found = "expected a run, found no step in it"
        else:
            found = f"expected a run, found {'an empty directory' if there is None or there.is_folder else 'a file'}"
    raise NotFoundError(f"{place}: {found}{new_run.suggest_run(store, place)}")


def runs_in(store: Store, place: str) -> list[str]:
    """Returns the paths of the runs in a directory, and of folders that this process may not read.

    Without a run the list is empty, because the unreadable folders need not be runs.
    """
    found: list[str] = []
    closed: list[str] = []
    for name in store.list(place):
        path = posixpath.join(place, name)
        if name == SYSTEM_FOLDER:
            continue
        try:
            if is_folder(store, path, links=True) and is_run(store, path):
                found.append(path)
        except PermissionError:
            closed.append(path)
        except MismatchError:  # It has several prefixes, so it has steps.
            found.append(path)
    return sorted([*found, *closed]) if found else []


def _valid_native(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.state == "good" and row.format == "treering"]


def _rows_to_delete(keep: Policy, rows: list[Row]) -> list[Row]:
    """Returns the steps that the policy does not keep, without pinned ones and links. The newest always stays.

    Steps that links lead to are included, so that the caller can say why they stay.
    """
    good = [row.saved for row in _valid_native(rows) if row.saved]
    linked = {row.step for row in rows if row.linked_by}
    stay = linked.union((one.step for one in good[-1:]), (row.step for row in rows if row.pinned or row.link))
    wanted = keep.kept(good) | with_bases(good, stay) - linked
    unwanted = {one.step for one in good} - wanted
    unwanted.update(unwanted_emptied(good, [row.emptied for row in rows if row.emptied], keep.kept))
    return [row for row in rows if row.step in unwanted and not (row.pinned or row.link)]


def _mark_deleted(store: Store, place: str, keep: Policy, rows: list[Row]) -> list[Row]:
    """Marks the rows that a `Checkpointer` with this policy would delete."""
    unwanted = {row.step for row in _rows_to_delete(keep, rows)}
    known = {name for row in _valid_native(rows) for name in row.metrics}
    for metric in keep.metrics - known:
        text = "%s: no step has the metric %r, so all stay; they have %s"
        _log.warning(text, place, metric, name_known(metric, known) or "no metrics")
    result: list[Row] = []
    for row in rows:
        if row.step in unwanted and row.linked_by:
            _log.warning("step %d stays: %s to it", row.step, _run.describe_links(row.linked_by))
        elif row.step in unwanted:
            try:
                removal.check_removable(store, row.path)
                row = dataclasses.replace(row, deleted=True)
            except UnsupportedError as error:
                _log.warning("step %d stays: %s", row.step, error)
                row = dataclasses.replace(row, state="unsupported")
        result.append(row)
    return result


def _native_rows(steps: StepCatalog, own: dict[int, str]) -> list[Row]:
    """Returns the rows of native steps. In a bucket each manifest takes a request, so several are read at a time."""
    if steps.store.has_folders:
        return [_native_row(steps, step, path) for step, path in own.items()]
    found: dict[int, Row] = {}

    def read(job: tuple[contextvars.Context, int]) -> None:
        context, step = job
        found[step] = context.run(_native_row, steps, step, own[step])

    # The threads see the listing of `Store.glance`, too.
    in_parallel([(contextvars.copy_context(), step) for step in own], read, _REQUESTS)
    return [found[step] for step in own]


def _native_row(steps: StepCatalog, step: int, path: str) -> Row:
    status = steps.status_of(step, path)
    pinned, link = pins.is_pinned(steps.store, path), steps.store.is_link(path)
    if isinstance(status, Saved):
        metrics = dict(status.metrics)
        published = status.published
        return Row(
            step, path, "good", "treering", status.created, status.nbytes, metrics, pinned, link, (), status.base,
            published and published.share, published and published.seconds, saved=status,
        )  # fmt: skip
    nbytes, emptied = size_or_none(steps.store, path), steps.read_emptied(step, path)
    return Row(step, path, status, nbytes=nbytes, pinned=pinned, link=link, emptied=emptied)


def _foreign_row(store: Store, step: int, path: str, format: str | None) -> Row:
    try:
        ckpt = open_in_store(store, path, format)
    except PermissionError:
        return Row(step, path, "closed", format or "?", link=store.is_link(path))
    except TreeringError as error:
        raise_if_momentary(error)
        return Row(step, path, "damaged", format or "?", nbytes=size_or_none(store, path), link=store.is_link(path))
    created = ckpt.created and ckpt.created.timestamp()
    return Row(step, path, "good", ckpt.format, created, ckpt.nbytes, ckpt.metrics, link=store.is_link(path))


def _uncommitted_row(store: Store, step: int, path: str) -> Row:
    state: State = "unfinished"
    try:
        with reading(path):
            summary.stat_manifest(store, path)
    except PermissionError:
        return Row(step, path, "closed")
    except UnreadableError:
        state = "damaged"
    return Row(step, path, state, nbytes=size_or_none(store, path))
