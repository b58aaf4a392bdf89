"""Converts checkpoints from one format to another, and runs to runs of Orbax."""

import contextlib
import dataclasses
import logging
import os
import posixpath
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Unpack

from .. import formats, stores
from .._core import expansion
from .._core.entries import ArrayEntry
from .._core.leaf_paths import join_names
from .._core.source import arrays_of, check_not_left_out, item_names
from .._core.tracebacks import hide_internal_frames
from .._restore.checkpoint import Checkpoint
from .._run import external_writes, run_layout
from .._run.open import open_checkpoint
from .._save.pending import SaveReport
from .._save.save import preview, save
from .._save.target import FormatOptions, SaveOptions
from ..errors import CorruptError, MismatchError, NotFoundError, TreeringError
from ..formats.orbax.run import read_run_metadata, write_run_metadata
from ..formats.orbax.schema import STEP
from ..formats.treering import pins
from ..rules import Rule
from ..stores.store import Store

_log = logging.getLogger("treering")


@hide_internal_frames
def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    step: int | None = None,
    source_format: str | None = None,
    format: str | None = None,
    at: str = "",
    rules: Sequence[Rule] = (),
    dtype: Any = None,
    overwrite: bool = False,
    memory_limit: int | None = 1 << 30,
    max_expansion: float = expansion.MAX_RATIO,
    progress: bool = False,
    **options: "Unpack[FormatOptions]",
) -> SaveReport:
    """Writes a checkpoint of any format in another format (or the same), in bounded memory.

    >>> tr.convert("t5x/checkpoint_1000000", "model.safetensors", at="target")

    It is `treering.save(dst, treering.open(src).at(at), …)` and has the options of `treering.save`. Step, metrics and
    metadata are copied if the format has a place for them.

    step: the step of a run; by default its latest valid one.
    source_format: the `format` of `treering.open`.
    memory_limit: bytes of arrays in memory at a time.
    max_expansion: as in `treering.restore`.

    If `dst` would be a step of a run, raises an `ExistsError` that names another process that writes the run, and
    `MismatchError` for a `local=` directory. This is checked once, before the conversion, without a lock: it does not
    notice a job that begins meanwhile or, in a bucket, a job of another machine. The command `treering convert` takes
    the lock.
    """
    ckpt = open_source(src, dst, step, source_format, at, max_expansion)
    return save(
        dst,
        ckpt,
        format=format,
        overwrite=overwrite,
        rules=rules,
        dtype=dtype,
        processes="this",
        # Formats hold up to as much again while they read and write.
        memory_limit=memory_limit and memory_limit // 2,
        progress=progress,
        **options,
    )


class ConversionPlan(NamedTuple):
    """A checkpoint that `convert` would write. `nbytes` are the bytes of its arrays."""

    path: str
    format: str
    step: int | None
    leaves: int
    nbytes: int


def plan(
    ckpt: Checkpoint, dst: str | os.PathLike[str], options: SaveOptions, step: int | None = None
) -> ConversionPlan:
    """Returns what `convert` would write, and writes nothing. Raises what `convert` raises before it reads arrays."""
    target, view = preview(dst, ckpt, options, step)
    entries = view.entries.values()
    nbytes = sum(entry.nbytes for entry in entries if isinstance(entry, ArrayEntry))
    return ConversionPlan(target.path, target.format.name, view.step, len(entries), nbytes)


def open_source(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    step: int | None,
    source_format: str | None,
    at: str,
    max_expansion: float,
) -> Checkpoint:
    """Opens the source of `convert`. Raises `ExistsError` if another process writes the run that `dst` belongs to."""
    try:
        ckpt = open_checkpoint(src, step=step, format=source_format)
    except NotFoundError as error:
        if _are_swapped(src, dst):
            raise NotFoundError(f"{error}; the source comes first, and the target {dst} has a checkpoint") from None
        raise
    ckpt = ckpt.at(at)
    check_not_left_out(ckpt._source)
    expansion.check(ckpt._source, arrays_of(ckpt._source), ckpt.path, max_expansion)
    place = stores.absolute(dst)
    if (run := external_writes.enclosing_run(stores.get(place), place)) is not None:
        external_writes.check_no_writer(stores.get(place), run)
    return ckpt


def _are_swapped(src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> bool:
    """Returns True if nothing is at the source, and a checkpoint is at the target."""
    place = stores.absolute(src)
    try:
        return stores.get(place).stat(place) is None and open_checkpoint(dst) is not None
    except (TreeringError, OSError):
        return False


@dataclasses.dataclass
class RunConversion:
    """The steps that were written, or would be, and the paths of those that were left behind."""

    path: str
    written: list[str] = dataclasses.field(default_factory=list)
    left_behind: list[str] = dataclasses.field(default_factory=list)
    nbytes: int = 0

    @contextlib.contextmanager
    def _noting_failures(self, source: str) -> Iterator[None]:
        """Notes and logs the damage that keeps a step from being converted."""
        try:
            yield
        except CorruptError as error:
            _log.error("not converted: %s", error)
            self.left_behind.append(source)


def convert_run(
    run: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    options: SaveOptions,
    *,
    source_format: str | None = None,
    prefix: str | None = None,
    at: str = "",
    max_expansion: float = expansion.MAX_RATIO,
    dry_run: bool = False,
) -> RunConversion:
    """Writes all steps of a run as the directory of an Orbax `CheckpointManager`, ascending, with its metadata.

    The names of the steps are those of Orbax: ``30``, or ``ckpt_30`` if they have such a prefix. All steps are checked
    before the first is written. Damaged steps are logged and left behind.

    Raises the errors of `convert` for each step, `NotFoundError` without steps, and `MismatchError` for a target that
    is the run itself.
    """
    place, to = stores.absolute_run(run), stores.absolute_run(dst)
    store, target_store = stores.get(place), stores.get(to)
    if store is target_store and store.real_path(place) == target_store.real_path(to):
        raise MismatchError(f"{to}: expected a target other than the source, found the source itself")
    if (above := external_writes.enclosing_run(target_store, to)) is not None:
        external_writes.check_no_writer(target_store, above)
    only = None if source_format is None else formats.get(source_format)
    steps = run_layout.located_steps(store, place, prefix, only)
    if not steps:
        raise NotFoundError(f"{place}: expected steps to convert, found none")
    done, sources = RunConversion(to), list[tuple[str, Checkpoint, ConversionPlan, SaveOptions]]()
    for step, found in steps.items():
        path = posixpath.join(to, _name_for_orbax(step, posixpath.basename(found.path)))
        with done._noting_failures(found.path):
            ckpt = open_source(found.path, path, None, found.format, at, max_expansion)
            several = item_names(ckpt._source) is not None
            own = options._replace(format_options={"composite": True}) if several else options
            sources.append((found.path, ckpt, plan(ckpt, path, own, step), own))
    _warn_of_lost(store, place, [found.path for found in steps.values()])
    enclosing = external_writes.enclosing_run(target_store, posixpath.join(to, "0"))
    with contextlib.ExitStack() as stack:
        if enclosing is not None and not dry_run:
            stack.enter_context(external_writes.locked_run(target_store, to, replaces=options.overwrite))
        for source, ckpt, planned, own in sources:
            with done._noting_failures(source):
                done.nbytes += planned.nbytes if dry_run else _write(ckpt, planned, own).nbytes
                done.written.append(planned.path)
        if not dry_run and isinstance(metadata := read_run_metadata(store, place), dict):
            write_run_metadata(target_store, to, metadata)
    return done


def _name_for_orbax(step: int, name: str) -> str:
    """Returns the name of a step in a directory of Orbax, for its name in a run. The adapter's names stay as they are.

    Orbax finds only names of the length that its option gives, which is no padding by default.
    """
    found = STEP.fullmatch(name)
    if found is not None and len(found[2]) != run_layout.MIN_STEP_DIGITS:
        return name
    return f"{found[1] if found else ''}{step}"


def _warn_of_lost(store: Store, run: str, paths: Sequence[str]) -> None:
    if pinned := [posixpath.basename(path) for path in paths if pins.is_pinned(store, path)]:
        what = "has no pins, so its manager may delete steps that are pinned here"
        _log.warning("%s: Orbax %s: %s", run, what, join_names(tuple(pinned)))
    if archived := run_layout.archived_runs(store, run):
        _log.warning("%s: archived steps are not converted: %s", run, join_names(tuple(archived)))


def _write(ckpt: Checkpoint, planned: ConversionPlan, options: SaveOptions) -> SaveReport:
    # The metadata of a step of Orbax include those of its run, which are written for all steps.
    of_step = getattr(ckpt._source, "step_metadata", None)
    return save(
        planned.path,
        ckpt,
        step=planned.step,
        metadata={} if of_step is None and hasattr(ckpt._source, "step_metadata") else of_step,
        format=planned.format,
        overwrite=options.overwrite,
        rules=options.rules,
        dtype=options.dtype,
        processes="this",
        memory_limit=options.memory_limit and options.memory_limit // 2,
        progress=options.progress,
        **options.format_options,
    )
