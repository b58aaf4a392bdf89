"""Joins arrays from pieces that are stored separately."""

from collections.abc import Sequence

import numpy as np

from ..._core.boxes import Box, Cells, box_shape, intersect, slices
from ..._threads.pool import in_parallel
from ...errors import UnsupportedError
from ...stores.buffers import empty_aligned_array
from .reader import Stored

_MAX_SERIAL_BYTES = 1 << 20  # up to this size one thread copies faster than several
_READ_THREADS = 4  # pieces that are read at a time
_MAX_SIZE = 1 << 62  # of an axis; bounds must fit into 64 bits
_MAX_PIECES_OFF_GRID = 1 << 14  # all of which are compared with each other


class Pieces:
    """An array in pieces that together have each element once; see `Stored`. Each piece is an array with its box."""

    def __init__(self, pieces: Sequence[tuple[Box, Stored]], dtype: np.dtype):
        self._pieces, self._dtype = pieces, dtype

    def can_map(self) -> bool:
        return False

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        parts = [(common, place, one) for place, one in self._pieces if (common := intersect(place, box)) is not None]
        if len(parts) == 1 and parts[0][0] == box:
            return _read(*parts[0], mmap)
        out = empty_aligned_array(box_shape(box), self._dtype)

        def copy(part: tuple[Box, Box, Stored]) -> None:
            out[slices(part[0], box)] = _read(*part, False)

        in_parallel(parts, copy, _READ_THREADS if out.nbytes > _MAX_SERIAL_BYTES else 1)
        return out


def _read(box: Box, place: Box, piece: Stored, mmap: bool) -> np.ndarray:
    """Reads a box from the piece at `place`."""
    return piece.read(tuple((start - o, stop - o) for (start, stop), (o, _) in zip(box, place, strict=True)), mmap)


def tile(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Returns True if boxes make up an array: they are inside it, do not overlap and leave no holes.

    Raises `UnsupportedError` for very many boxes that form no grid.
    """
    if max(shape, default=0) > _MAX_SIZE:
        return False
    if any(not 0 <= start <= stop <= size for box in boxes for (start, stop), size in zip(box, shape, strict=True)):
        return False
    try:
        return Cells.of(boxes)[0].shape == shape
    except ValueError:
        pass  # They form no grid, but may make up the array in another way.
    if len(boxes) > _MAX_PIECES_OFF_GRID:
        raise UnsupportedError(f"expected at most {_MAX_PIECES_OFF_GRID} pieces that form no grid, found {len(boxes)}")
    bounds = np.array(boxes, dtype=np.int64).reshape(len(boxes), len(shape), 2)
    starts, stops = bounds[:, :, 0], bounds[:, :, 1]
    if not len(boxes) or not shape:
        return False
    keep = (starts < stops).all(axis=1)
    starts, stops = starts[keep], stops[keep]
    volume = sum(int(np.prod(size, dtype=object)) for size in stops - starts)
    if volume != int(np.prod(shape, dtype=object)):
        return False
    for n in range(len(starts) - 1):  # Without holes the volume fits, so only an overlap is left to find.
        if ((starts[n + 1 :] < stops[n]) & (starts[n] < stops[n + 1 :])).all(axis=1).any():
            return False
    return True
