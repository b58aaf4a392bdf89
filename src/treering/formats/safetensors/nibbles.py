"""Four-bit floats: two in a byte, the first in the lower half. The last axis must have an even size."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, slice_boxes
from ..._core.entries import ArrayEntry
from .._shared.extents import Runs

DTYPE, CODE = "float4_e2m1fn", "F4"


def is_paired(shape: Sequence[int]) -> bool:
    """Returns True if no byte has elements of two rows, or half an element."""
    return bool(shape) and shape[-1] % 2 == 0


def stored_nbytes(entry: ArrayEntry) -> int:
    """Returns the bytes that an array takes in a file."""
    nbytes = math.prod(entry.shape) * dtypes.itemsize(entry.dtype)
    return nbytes // 2 if entry.dtype == DTYPE else nbytes


def stored_slices(entry: ArrayEntry, limit: int) -> Iterator[Box]:
    """Yields consecutive boxes of at most `limit` bytes in memory, each from one byte boundary to another."""
    if entry.dtype != DTYPE:
        yield from slice_boxes(entry.shape, dtypes.itemsize(entry.dtype), limit)
        return
    for *outer, (start, stop) in slice_boxes((*entry.shape[:-1], entry.shape[-1] // 2), 2, limit):
        yield (*outer, (2 * start, 2 * stop))


def contiguous(array: np.ndarray) -> np.ndarray:
    """Returns an array whose memory is what a file stores, which may be the array itself."""
    if array.itemsize == 1 and array.dtype.name == DTYPE:
        return as_stored(array)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def as_stored(array: np.ndarray) -> np.ndarray:
    """Returns an array as the bytes that a file stores."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat[::2] & 15 | flat[1::2] << 4 if array.itemsize == 1 and array.dtype.name == DTYPE else flat


class Nibbles:
    """Reads an array of four-bit floats from a file; see `Stored`."""

    def __init__(self, runs: Runs):
        self._runs = runs

    def can_map(self) -> bool:
        return False

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        start, stop = box[-1]
        pairs = self._runs.read((*box[:-1], (start // 2, -(-stop // 2))), False)
        both = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], 2 * pairs.shape[-1])
        own = both[..., start % 2 : start % 2 + stop - start]
        return np.ascontiguousarray(own).view(dtypes.to_numpy(DTYPE))
