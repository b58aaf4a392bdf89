"""Limits how many bytes of memory a restore may use for each byte that is stored.

A small file can claim very large arrays: many leaves may share one array, and compressed zeros take almost no space.
Neither is damage, so the caller can lift the limit.
"""

import math
import numbers
from collections.abc import Iterable
from typing import Any

from ..errors import MismatchError
from . import host_memory
from .boxes import Box, box_shape
from .dtypes import itemsize
from .entries import ArrayEntry
from .source import Source, expands
from .units import nbytes

MAX_RATIO = 100.0  # bytes in memory for each stored byte
_EXEMPT_BYTES = 64 << 20  # bytes that every checkpoint may use, even beyond that ratio


def check_bound(max_ratio: Any) -> None:
    """Raises `MismatchError` for anything but a number from 1."""
    if isinstance(max_ratio, bool) or not isinstance(max_ratio, int | float) or not max_ratio >= 1:
        raise MismatchError(f"max_expansion={max_ratio!r}: expected a number from 1, or math.inf")


def check_memory_limit(limit: Any) -> None:
    """Raises `MismatchError` for anything but a number of bytes or None."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, numbers.Real) or limit < 0):
        raise MismatchError(f"memory_limit={limit!r}: expected a number of bytes, such as {1 << 30}, or None")


def check(source: Source, entries: Iterable[ArrayEntry], name: str, max_ratio: float) -> None:
    """Raises `MismatchError` if arrays of a source take more than `max_ratio` bytes for each stored byte."""
    check_bound(max_ratio)
    if not expands(source) or max_ratio == math.inf:
        return
    total = sum(entry.nbytes for entry in entries)
    if total > _bound(source, max_ratio):
        raise MismatchError(
            f"{name}: expected arrays of at most {max_ratio:g} times the {nbytes(source.nbytes)} stored, found "
            f"{nbytes(total)}. Many leaves may share one array, or the arrays compress well. If you trust this "
            "checkpoint, pass max_expansion=math.inf"
        )


def check_memory(source: Source, wanted: Iterable[tuple[ArrayEntry, Box]], name: str) -> None:
    """Raises `MismatchError` if boxes of arrays that expand take more bytes than this machine has memory.

    This bounds what is read without `max_expansion`, or beyond it. Nothing that is stored as it is read is refused.
    """
    if not expands(source):
        return
    total = sum(math.prod(box_shape(box)) * itemsize(entry.dtype) for entry, box in wanted)
    if total > _bound(source, MAX_RATIO) and total > (room := host_memory.total() or total):
        raise MismatchError(
            f"{name}: expected arrays of at most the {nbytes(room)} of memory here, found {nbytes(total)}, for which "
            f"{nbytes(source.nbytes)} are stored. Many leaves may share one array, or the arrays repeat their values. "
            "In Python, tr.open(path)[leaf][:10] reads a part"
        )


def _bound(source: Source, ratio: float) -> float:
    return max(ratio * source.nbytes, _EXEMPT_BYTES)
