"""Conversion from one format to another."""

import os
from collections.abc import Sequence
from typing import Any, Unpack

from .._core import expansion
from .._core.source import arrays_of
from .._core.tracebacks import at_the_caller
from .._run.open import open_checkpoint
from .._save.options import FormatOptions
from .._save.pending import SaveReport
from .._save.save import save
from ..rules import Rule


@at_the_caller
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
    max_expansion: float = expansion.MOST,
    progress: bool = False,
    **options: "Unpack[FormatOptions]",
) -> SaveReport:
    """Writes a checkpoint of any format in another (or the same), in bounded memory. A run: a step, or the latest good.

    >>> tr.convert("t5x/checkpoint_1000000", "model.safetensors", at="target")

    It is `treering.save(dst, treering.open(src).at(at), …)`, whose options these are; step, metrics and metadata come
    along where the format has a place for them. source_format: the `format` of `treering.open`. memory_limit: bytes of
    arrays in memory at a time. max_expansion: as of `treering.restore`.
    """
    ckpt = open_checkpoint(src, step=step, format=source_format).at(at)
    expansion.check(ckpt._source, arrays_of(ckpt._source), ckpt.path, max_expansion)
    return save(
        dst,
        ckpt,
        format=format,
        overwrite=overwrite,
        rules=rules,
        dtype=dtype,
        processes="this",
        memory_limit=memory_limit and memory_limit // 2,  # what formats hold while they read and write comes on top
        progress=progress,
        **options,
    )
