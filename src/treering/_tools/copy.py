"""Copies checkpoints and runs to other places, byte for byte."""

import contextlib
import dataclasses
import functools
import logging
import os
import posixpath
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from .. import formats, stores
from .._core.leaf_paths import join_names, relative_to
from .._run import external_writes, new_run
from .._run import run_layout as _run
from .._run.step_fallback import detect_or_explain, retry_if_replaced
from ..errors import CorruptError, ExistsError, MismatchError, NotFoundError, UnsupportedError
from ..formats.treering import copy, manifest, metrics, pins, summary
from ..formats.treering.ledger import Ledger
from ..formats.treering.read import Reader
from ..stores.file_io import read_file
from ..stores.read_errors import ReplacedError
from ..stores.store import Store
from .check import unfinished_steps

_FOREIGN_REASON = "written by another library; convert it instead"
_log = logging.getLogger("treering")


class CheckpointCopy(NamedTuple):
    """A checkpoint at `path` in the store `source_store`, and its copy, present or future, at `target` in the store
    `target_store`.
    """

    source_store: Store
    path: str
    target_store: Store
    target: str

    def is_same(self, *, thorough: bool) -> bool | None:
        """Returns True if the copy has the same manifest and files of the right size, and None if there is no copy.

        With `thorough`, reads every byte of the copy. If they differ, raises the error of a damaged manifest of the
        checkpoint itself, because that may be the reason.
        """
        if summary.stat_manifest(self.target_store, self.target) is None:
            return None
        try:
            identity = summary.identity(self.source_store, self.path)
        except FileNotFoundError:
            return True  # A job has deleted the checkpoint since it was listed: the copy stays.
        try:
            is_same = identity == summary.identity(self.target_store, self.target)
            if is_same:
                reader = Reader(self.target_store, self.target)
                reader.check_present()
                is_same = not (thorough and any(reader.problems()))
        except (CorruptError, UnsupportedError, FileNotFoundError):
            is_same = False
        if not is_same:
            Reader(self.source_store, self.path)
        return is_same

    def differs(self) -> bool:
        """Returns True if the target has another checkpoint, rather than a damaged copy of this one."""
        return summary.identity_or_none(self.target_store, self.target) != summary.identity_or_none(
            self.source_store, self.path
        )

    def check_unpinned(self) -> None:
        """Raises `ExistsError` if the target has another checkpoint that is pinned."""
        if self.differs() and pins.is_pinned(self.target_store, self.target):
            raise ExistsError(
                f"{self.target}: expected a copy of {self.path}, found a pinned step that is another checkpoint, "
                "or whose "
                "manifest is damaged; unpin it before it is replaced"
            )

    def base_name(self) -> str | None:
        """Returns the name of the step that this one is stored as a difference to, if its manifest says one."""
        with contextlib.suppress(CorruptError, UnsupportedError, FileNotFoundError, PermissionError):
            data = read_file(self.source_store, summary.manifest_path(self.path))
            if base := manifest.summarize(data, self.path).base:
                return base.name
        return None

    def check_base(self, targets: Collection[str]) -> None:
        """Raises `MismatchError` if the copy would lack its base, unless that is one of the other targets."""
        if base := Reader(self.source_store, self.path).made_from:
            folder = posixpath.dirname(self.target)
            place = posixpath.join(folder, base.name)
            if place not in targets and summary.identity_or_none(self.target_store, place) != base.xxh3:
                raise MismatchError(
                    f"{self.path}: it is stored as the difference to {base.name}, which {folder} does not have; copy "
                    "that too, or convert this one, which writes a complete checkpoint"
                )

    def complete(self) -> None:
        """Adds to the copy the metrics and the pin that it lacks."""
        with contextlib.suppress(FileNotFoundError):  # A job deletes the checkpoint: the copy stays.
            metrics.copy(
                self.source_store,
                self.path,
                self.target_store,
                self.target,
                summary.identity(self.source_store, self.path),
            )
            if pins.is_pinned(self.source_store, self.path):
                pins.pin(self.target_store, self.target, True)

    def make(self, moved: Callable[[int], None], *, absent: bool, ledger: Ledger) -> None:
        """Copies the checkpoint, repairs its copy, or replaces another checkpoint.

        absent: the target was missing. ledger: the files of the checkpoints that were copied before.

        Raises the errors of `formats.treering.copy` and `check_unpinned`, and `ExistsError` if another process wrote
        the target first.
        """
        replaced = summary.stat_manifest(self.target_store, self.target) is not None
        if replaced and absent:
            raise ExistsError(
                f"{self.target}: expected nothing, found a checkpoint that another process wrote meanwhile; it "
                "is unchanged"
            )
        if replaced and summary.stat_manifest(self.source_store, self.path) is None:
            raise CorruptError(f"{self.target}: is damaged or differs, and {self.path} was deleted before the repair")
        if replaced and not self.differs():
            copy.repair(self.source_store, self.path, self.target_store, self.target, on_progress=moved)
            self.complete()
            return
        if replaced:
            self.check_unpinned()
        copy.copy(
            self.source_store, self.path, self.target_store, self.target,
            overwrite=replaced, on_progress=moved, ledger=ledger,
        )  # fmt: skip

    def measure(self, moved: Callable[[int], None]) -> None:
        """Counts the bytes that `make` would copy. Raises its errors, as far as they show without reading arrays."""
        reader = Reader(self.source_store, self.path)
        reader.check_present()
        is_there = summary.stat_manifest(self.target_store, self.target) is not None
        bad = copy.damaged_files(self.target_store, self.target) if is_there and not self.differs() else None
        moved(sum(file.size for file in reader.files if bad is None or file.name in bad))


@dataclasses.dataclass
class CopyResult:
    """The paths that a copy has handled, or would handle.

    `copied`: the new copies. `there`: copies that existed, with the same manifest and files of the right size.
    `left_behind`: checkpoints of the source that are damaged, of a later release, or of another library. `gone`:
    checkpoints of the source that a job deleted meanwhile. `nbytes`: the bytes that were copied.
    """

    copied: list[str] = dataclasses.field(default_factory=list)
    there: list[str] = dataclasses.field(default_factory=list)
    left_behind: list[str] = dataclasses.field(default_factory=list)
    gone: list[str] = dataclasses.field(default_factory=list)
    nbytes: int = 0

    def _add_bytes(self, nbytes: int) -> None:
        self.nbytes += nbytes

    @contextlib.contextmanager
    def _noting_failures(self, one: CheckpointCopy, single: bool) -> Iterator[None]:
        """Notes and logs the error that keeps a step of a run from being copied.

        Raises the error of a single checkpoint, and a `PermissionError` of the target.
        """
        try:
            yield
        except (ReplacedError, CorruptError, UnsupportedError, PermissionError) as error:
            if single or (isinstance(error, PermissionError) and not str(error.filename).startswith(one.path)):
                raise  # A target that cannot be written concerns every step.
            if isinstance(error, ReplacedError):
                self.gone.append(one.path)
            else:
                self._leave_behind(one.path, error)

    def _leave_behind(self, path: str, why: object) -> None:
        _log.error("not copied: %s", why)
        self.left_behind.append(path)


def copy_checkpoints(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    steps: Sequence[range] = (),
    overwrite: bool = False,
    dry_run: bool = False,
    prefix: str | None = None,
) -> CopyResult:
    """Copies a checkpoint of the native format, or all steps of a run that the target lacks, the newest first.

    Existing copies receive pins and recorded metrics. They are read only with `overwrite`: then copies that differ are
    replaced, and of damaged copies the damaged files, which leaves their pins and metrics. Without `overwrite`, both
    raise `ExistsError` before anything is copied, and so do pinned copies that differ, also with it. Damaged steps,
    steps of a later release and steps of other libraries are logged and left behind. A step that a job deletes
    meanwhile is logged and skipped.

    steps: copies only the steps of a run in these ranges.
    dry_run: writes nothing and returns what would be copied, as far as it shows without reading arrays of the source.
    prefix: of the names of the run's steps; by default that of those that are there.

    Raises `UnsupportedError` for other libraries' checkpoints, `NotFoundError` for `steps` or a `prefix` that are not
    there, `MismatchError` for a target that is the source, a `local=` directory, or a run with other names of steps,
    and an `ExistsError` that names the job that writes the target.
    """
    path, to = stores.absolute(source), stores.absolute(target)
    source_store, target_store = stores.get(path), stores.get(to)
    if source_store is target_store:
        inside = relative_to(target_store.real_path(to), source_store.real_path(path))
        if inside is not None:
            what = f"a place in it, {inside}" if inside else "the source itself"
            raise MismatchError(f"{to}: expected a target other than the source, found {what}")
    done = CopyResult()
    with source_store.glance(path):
        single = summary.stat_manifest(source_store, path) is not None
        if single:
            if steps or prefix is not None:
                meant = new_run.suggest_run(source_store, path)
                raise MismatchError(f"{path}: expected a run to choose steps from, found one checkpoint{meant}")
            pairs, run, prefix = (
                [CheckpointCopy(source_store, path, target_store, to)],
                external_writes.enclosing_run(target_store, to),
                _run.DEFAULT_PREFIX,
            )
        else:
            names = _names_to_copy(source_store, path, steps, prefix, done)
            if prefix is None and not steps:
                _warn_of_others(source_store, path)
            paths = [(posixpath.join(path, name), posixpath.join(to, name)) for name in names]
            pairs = [CheckpointCopy(source_store, one, target_store, other) for one, other in paths]
            prefix, run = _run.find_prefix(source_store, path) if prefix is None else prefix, to
            check_target(target_store, to, prefix)
    if run is not None:
        external_writes.check_no_writer(target_store, run)
    same: dict[CheckpointCopy, bool | None] = {}
    for one in pairs:
        with done._noting_failures(one, single):
            same[one] = one.is_same(thorough=overwrite)
    if single or steps:
        for one in [one for one, is_same in same.items() if not is_same]:
            with done._noting_failures(one, single):
                one.check_base([other.target for other in same])
    if not overwrite and (differing := [one.target for one, is_same in same.items() if is_same is False]):
        raise ExistsError(
            f"{differing[0]}: expected a copy of the step or nothing, found another checkpoint or a damaged copy; "
            "overwrite=True replaces it"
        )
    for one in same if overwrite else ():
        if same[one] is False:
            one.check_unpinned()
    writes = run is not None and not dry_run and not all(same.values())
    replaces = any(is_same is False and one.differs() for one, is_same in same.items())
    lock = (
        external_writes.locked_run(target_store, run, prefix, replaces=replaces) if run is not None and writes else None
    )
    with lock or contextlib.nullcontext():
        # The newest first: a job that needs the copy after an interrupt continues from the newest step.
        ledger = Ledger(max_checkpoints=2)
        for one in _bases_first(same):
            is_same = same[one]
            with done._noting_failures(one, single):
                if not is_same:
                    copy = functools.partial(one.make, absent=is_same is None, ledger=ledger)
                    make = one.measure if dry_run else copy
                    retry_if_replaced(functools.partial(make, done._add_bytes))
                elif not dry_run:
                    one.complete()
                (done.there if is_same else done.copied).append(one.target)
    if done.gone and not (done.copied or done.there or done.left_behind):
        raise ReplacedError(f"{path}: expected a step, found none: all steps were deleted meanwhile")
    if done.gone:
        _log.warning("%s: steps deleted since the copy began are not copied: %s", path, _join_names(done.gone))
    if not single and (archived := _run.archived_runs(source_store, path)):
        _log.warning("%s: archived steps are not copied: %s", path, join_names(tuple(archived)))
    return done


def _bases_first(same: dict[CheckpointCopy, bool | None]) -> Iterator[CheckpointCopy]:
    """Yields the newest checkpoint first, but each base before what is made from it: a difference alone is unreadable.

    The manifest of a checkpoint to copy is read when its turn comes.

    same: for each checkpoint, ascending, True if the target has it already.
    """
    by_name = {posixpath.basename(one.path): one for one in same}
    placed: set[CheckpointCopy] = set()
    for one in reversed(same):
        chain: list[CheckpointCopy] = []
        at: CheckpointCopy | None = one
        while at and at not in placed:
            placed.add(at)
            chain.append(at)
            at = None if same[at] else by_name.get(at.base_name() or "")
        yield from reversed(chain)


def _warn_of_others(store: Store, run: str) -> None:
    known = {posixpath.basename(path) for path in _run.all_steps(store, run).values()}
    if others := new_run.other_checkpoints(store, run, known):
        _log.warning("%s: checkpoints with other names are not copied: %s", run, join_names(tuple(others)))
    if unfinished := unfinished_steps(store, run, None, known):
        _log.warning("%s: unfinished steps are not copied: %s", run, join_names(tuple(unfinished)))


def _join_names(paths: Sequence[str]) -> str:
    return join_names(tuple(map(posixpath.basename, paths)))


def _names_to_copy(store: Store, path: str, steps: Sequence[range], prefix: str | None, done: CopyResult) -> list[str]:
    """Returns the directories of the steps to copy, ascending. Notes wanted steps that cannot be copied in `done`."""
    names = _run.own_steps(store, path, prefix)
    if prefix is not None and not names:
        raise NotFoundError(f"{path}: expected a run with steps whose names begin with {prefix!r}, found none")
    foreign = formats.foreign_steps(store, path, set(names.values()))
    if not names:
        first = next(iter(foreign.values())).path if foreign else path
        if not foreign:
            detect_or_explain(store, path)
        raise UnsupportedError(f"{first}: {_FOREIGN_REASON}")
    others = {step: (one.path, _FOREIGN_REASON) for step, one in foreign.items()} | _closed_steps(
        store, path, prefix, names
    )
    for wanted in steps:
        if not any(step in wanted for step in (*names, *others)):
            text = f"step {wanted[0]}" if len(wanted) == 1 else f"steps from {wanted[0]} to {wanted[-1]}"
            raise NotFoundError(f"{path}: expected {text}, found {_join_names(list(names.values())[-5:])}")
    for step, (place, why) in others.items():
        if _is_wanted(step, steps):
            done._leave_behind(place, f"{place}: {why}")
    return [name for step, name in names.items() if _is_wanted(step, steps)]


def _closed_steps(store: Store, path: str, prefix: str | None, names: Mapping[int, str]) -> dict[int, tuple[str, str]]:
    """Returns the steps that are not in `names` because this user may not read them: their paths and the reasons."""
    found: dict[int, tuple[str, str]] = {}
    prefix = _run.find_prefix(store, path) if prefix is None else prefix
    for name in store.list(path):
        step, place = _run.parse_step_name(name, prefix), posixpath.join(path, name)
        if step is not None and step not in names:
            try:
                summary.stat_manifest(store, place)
            except PermissionError as error:
                found[step] = place, f"cannot be read by this user ({error.strerror})"
    return found


def _is_wanted(step: int, steps: Sequence[range]) -> bool:
    return not steps or any(step in wanted for wanted in steps)


def check_target(store: Store, to: str, prefix: str) -> None:
    """Checks that the target of a run is missing, or a run whose step names have the same prefix.

    Raises `ExistsError` for a checkpoint, a file or a directory of runs, and `MismatchError` for another prefix.
    """
    if formats.has_folder(store, to):
        raise ExistsError(f"{to}: expected a run, or nothing, found one checkpoint")
    if (there := store.stat(to)) and not there.is_folder:
        raise ExistsError(f"{to}: expected a run, or nothing, found a file")
    if not _run.list_step_names(store, to):
        if found := new_run.runs_below(store, to):
            raise ExistsError(
                f"{to}: expected a run, or nothing, found a directory of runs: {found}; name the run in it"
            )
    elif (found := _run.find_prefix(store, to)) != prefix:
        raise MismatchError(f"{to}: expected step names that begin with {prefix!r}, as in the source, found {found!r}")
