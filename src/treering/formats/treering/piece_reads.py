"""The parts of wanted boxes that pieces hold, and the arrays that are assembled from their bytes."""

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, box_shape, byte_ranges, slices, split_at_gaps
from ..._core.entries import ArrayEntry
from ..._threads.pool import in_parallel
from ...stores.buffers import empty_aligned_array, strided_arrays
from .manifest import BLOCK

_MAX_SERIAL_BYTES = 16 << 20  # up to this size one thread copies faster than several


class PieceRead(msgspec.Struct, frozen=True, gc=False):
    """The part of a wanted box that one piece holds. It spans the bytes [begin, end) of a file's buffer.

    With `strides`, only the byte ranges in `ranges` are needed to read it. `at` gives the slices of the wanted box that
    the part fills.
    """

    file: int
    begin: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    ranges: Any = None
    target: Any = ...


def split_piece(
    file: int, begin: int, piece: Box, inner: Box, box: Box, itemsize: int, *, separate_rows: bool
) -> list[PieceRead]:
    """Returns the parts of a box in a piece that begins at `begin`. `inner` is the intersection of the two.

    All boxes have global indices. With `separate_rows`, rows with large gaps between them become separate parts, so
    that the bytes in the gaps take no memory.
    """
    shape = box_shape(piece)
    if inner == piece:
        return [PieceRead(file, begin, begin + itemsize * math.prod(shape), shape, target=slices(inner, box))]
    strides = tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    relative = tuple((a - o, b - o) for (a, b), (o, _) in zip(inner, piece, strict=True))
    parts: list[PieceRead] = []
    for row in split_at_gaps(shape, relative, itemsize, BLOCK) if separate_rows else (relative,):
        ranges = [(begin + first, begin + last) for first, last in byte_ranges(shape, row, itemsize, BLOCK)]
        at = slices(tuple((a + o, b + o) for (a, b), (o, _) in zip(row, piece, strict=True)), box)
        parts.append(PieceRead(file, ranges[0][0], ranges[-1][1], box_shape(row), strides, ranges, at))
    return parts


def join_contiguous(parts: list[PieceRead], shape: tuple[int, ...]) -> list[PieceRead]:
    """Joins the parts of a box into one if their bytes follow each other in the file as they do in the box.

    A box with one part is a view of the file's memory, which saves a copy. Returns other parts as they are.
    """
    place = elements = 0
    for n, part in enumerate(parts):
        first = last = 0
        for where, size in zip(part.target, shape, strict=True):
            first, last = first * size + where.start, last * size + where.stop - 1
        count = math.prod(part.shape)
        runs_on = n == 0 or (part.file == parts[0].file and part.begin == place)
        if part.strides or not runs_on or first != elements or last - first + 1 != count:
            return parts
        place, elements = part.end, elements + count
    if len(parts) < 2 or elements != math.prod(shape):
        return parts
    return [PieceRead(parts[0].file, parts[0].begin, place, shape)]


class Memory:
    """Bytes of a file in memory: either the mapped file, or runs of bytes that were read."""

    def __init__(self, runs: Sequence[tuple[int, Any]]):
        self._runs = runs  # (offset of the first byte in the file's buffer, memory), in ascending order

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the runs take. A mapped file takes none."""
        return sum(len(memory) for _, memory in self._runs if isinstance(memory, memoryview))

    def view(self, part: PieceRead, dtype: np.dtype[Any]) -> np.ndarray:
        """Returns a part as an array that shares this memory."""
        offset, memory = self._runs[0] if len(self._runs) == 1 else self._find(part.begin)
        return np.ndarray(part.shape, dtype, memory, part.begin - offset, part.strides)

    def views(self, begin: int, count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[np.ndarray]:
        """Returns `count` arrays of one shape that follow each other from byte `begin` on. They share this memory."""
        offset, memory = self._find(begin)
        return strided_arrays(memory, begin - offset, count, shape, dtype, dtype.itemsize * math.prod(shape))

    def _find(self, begin: int) -> tuple[int, Any]:
        """Returns the run of bytes that holds a byte of the buffer."""
        return self._runs[bisect.bisect_right(self._runs, begin, key=lambda run: run[0]) - 1]


def ranges_by_file(parts: Iterable[PieceRead]) -> dict[int, list[tuple[int, int]]]:
    """Returns the byte ranges that the parts need, by file."""
    found: dict[int, list[tuple[int, int]]] = {}
    for part in parts:
        if part.file not in found:
            found[part.file] = []
        if part.ranges:
            found[part.file] += part.ranges
        else:
            found[part.file].append((part.begin, part.end))
    return found


def assemble(
    wanted: Sequence[tuple[ArrayEntry, Box]], parts: list[list[PieceRead]], memory: dict[int, Memory]
) -> list[np.ndarray]:
    """Returns one array per wanted box.

    A box with a single part becomes a view of the memory. Other boxes get new memory, which several threads fill.
    """
    arrays: list[np.ndarray] = []
    copies: list[tuple[np.ndarray, PieceRead]] = []
    for (entry, box), found in zip(wanted, parts, strict=True):
        dtype = dtypes.to_numpy(entry.dtype)
        if len(found) == 1:
            arrays.append(memory[found[0].file].view(found[0], dtype))
            continue
        own = empty_aligned_array(box_shape(box), dtype)
        arrays.append(own)
        copies += [(own, part) for part in found]

    def copy(job: tuple[np.ndarray, PieceRead]) -> None:
        own, part = job
        own[part.target] = memory[part.file].view(part, own.dtype)

    if sum(own[part.target].nbytes for own, part in copies) > _MAX_SERIAL_BYTES:
        in_parallel(copies, copy)
    else:
        for job in copies:
            copy(job)
    return arrays


def as_bools(array: np.ndarray) -> np.ndarray:
    """Returns the bools that the bytes of an array stand for. Every byte except 0 is true."""
    stored = array.view(np.uint8)
    return np.not_equal(stored, 0, out=np.empty(array.shape, bool)) if (stored > 1).any() else array
