"""Converts checkpoints from one format to another."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

from .. import stores
from .._core import expansion
from .._core.entries import ArrayEntry
from .._core.source import arrays_of
from .._core.subtree import check_not_left_out
from .._core.tracebacks import hide_internal_frames
from .._restore.checkpoint import Checkpoint
from .._run import external_writes
from .._run.open import open_checkpoint
from .._save.pending import SaveReport
from .._save.save import preview, save
from .._save.target import FormatOptions, SaveOptions
from ..rules import Rule


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


class Plan(NamedTuple):
    """A checkpoint that `convert` would write. `nbytes` are the bytes of its arrays."""

    path: str
    format: str
    step: int | None
    leaves: int
    nbytes: int


def plan(ckpt: Checkpoint, dst: str | os.PathLike[str], options: SaveOptions) -> Plan:
    """Returns what `convert` would write, and writes nothing. Raises what `convert` raises before it reads arrays."""
    target, view = preview(dst, ckpt, options)
    entries = view.entries.values()
    nbytes = sum(entry.nbytes for entry in entries if isinstance(entry, ArrayEntry))
    return Plan(target.path, target.format.name, ckpt.step, len(entries), nbytes)


def open_source(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    step: int | None,
    source_format: str | None,
    at: str,
    max_expansion: float,
) -> Checkpoint:
    """Opens the source of `convert`. Raises `ExistsError` if another process writes the run that `dst` belongs to."""
    ckpt = open_checkpoint(src, step=step, format=source_format).at(at)
    check_not_left_out(ckpt._source)
    expansion.check(ckpt._source, arrays_of(ckpt._source), ckpt.path, max_expansion)
    place = stores.absolute(dst)
    if (run := external_writes.enclosing_run(stores.get(place), place)) is not None:
        external_writes.check_no_writer(stores.get(place), run)
    return ckpt
