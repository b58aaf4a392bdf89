"""Reads arrays whose pieces are stored separately, in one file or in several."""

from collections.abc import Sequence

import numpy as np

from ..._core.boxes import Box, box_shape, intersect, slices
from ..._threads.pool import in_parallel
from ...stores.buffers import empty_aligned_array
from .reader import Stored

_MAX_SERIAL_BYTES = 1 << 20  # up to this size one thread copies faster than several
_READ_THREADS = 4  # pieces that are read at a time


class Partitioned:
    """An array in pieces that together have each element once; see `Stored`."""

    def __init__(self, pieces: Sequence[tuple[Box, Stored]], dtype: np.dtype):
        self._pieces, self._dtype = pieces, dtype

    def can_map(self) -> bool:
        return False

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        parts = [(common, place, one) for place, one in self._pieces if (common := intersect(place, box)) is not None]
        if len(parts) == 1:  # This piece has all of the box.
            return _read(*parts[0], mmap)
        out = empty_aligned_array(box_shape(box), self._dtype)

        def copy(part: tuple[Box, Box, Stored]) -> None:
            out[slices(part[0], box)] = _read(*part, False)

        in_parallel(parts, copy, _READ_THREADS if out.nbytes > _MAX_SERIAL_BYTES else 1)
        return out


def _read(box: Box, place: Box, piece: Stored, mmap: bool) -> np.ndarray:
    """Reads a box from the piece at `place`."""
    return piece.read(tuple((start - o, stop - o) for (start, stop), (o, _) in zip(box, place, strict=True)), mmap)
