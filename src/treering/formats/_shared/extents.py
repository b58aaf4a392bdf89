"""Arrays that lie in files as plain bytes, in one run or in several."""

import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from ..._core.boxes import Box, box_shape, rows_apart, slices, whole
from ...errors import CorruptError, UnsafeError
from ...stores.buffers import adoptable
from ...stores.ranges import Range, merge
from ...stores.store import Blob

_MAX_ELEMENTS = 1 << 58  # elements of an array; NumPy counts bytes in 63 bits
_GAP = 1 << 20  # bytes between rows up to which reading them as well is cheaper than another call
_SPAN = 64 << 20  # bytes that are read at a time of an array of which not everything is wanted
_SMALL_ARRAY_BYTES = (
    32 << 10
)  # bytes of an array that is read along with others, for a call takes longer than to copy it
_BETWEEN = 4 << 10  # bytes between two such arrays that are read as well
_TOGETHER = 256 << 10  # bytes that are read at once of such arrays; what the processor's cache holds


def check_shape(shape: tuple[int, ...], name: str) -> None:
    """Raises `UnsafeError` for a shape that no array can have, not even an empty one."""
    if len(shape) > 64 or min(shape, default=0) < 0 or math.prod(size or 1 for size in shape) >= _MAX_ELEMENTS:
        raise UnsafeError(f"{name}: no array can have the shape {list(shape)!s:.200}")


class Layout(msgspec.Struct, frozen=True, gc=False):
    """The layout of all arrays of one shape and dtype.

    `stored` is the dtype in the file, of either byte order; `dtype`, of the same size, is that of the array read.
    """

    shape: tuple[int, ...]
    stored: np.dtype[Any]
    dtype: np.dtype[Any]
    nbytes: int
    box: Box
    alignment: int  # that an array in memory needs; 0 where it can be none as it lies in the file


def layout(shape: tuple[int, ...], stored: Any, dtype: Any, name: str) -> Layout:
    """Makes a layout. Raises an `UnsafeError` that begins with `name` for a shape that no array can have."""
    stored = np.dtype(stored)
    dtype = np.dtype(stored.newbyteorder("=") if dtype is None else dtype)
    stored = dtype if stored == dtype else stored  # one object, so that the two are quickly compared
    check_shape(shape, name)
    alignment = dtype.alignment if stored.isnative else 0
    return Layout(shape, stored, dtype, math.prod(shape) * stored.itemsize, whole(shape), alignment)


class Runs(msgspec.Struct, frozen=True, gc=False):
    """An array whose C-ordered bytes are these runs, in order: file, offset and size of each. `of` makes one."""

    runs: tuple[tuple[Blob, int, int], ...]
    layout: Layout

    @staticmethod
    def of(runs: Sequence[tuple[Blob, int, int]], shape: tuple[int, ...], stored: Any, dtype: Any = None) -> "Runs":
        """Raises `CorruptError` and `UnsafeError` unless the runs lie in their files and make up the array."""
        name = runs[0][0].path if runs else ""
        found = layout(shape, stored, dtype, name)
        for file, offset, size in runs:
            if offset < 0 or size < 0 or offset + size > file.size:
                raise CorruptError(f"{file.path}: expected {offset + size} bytes, found {file.size}; it is cut short")
        total = sum(size for _, _, size in runs)
        if total != found.nbytes:
            raise CorruptError(f"{name}: expected {found.nbytes} bytes of an array, found {total}")
        return Runs(tuple(runs), found)

    def can_map(self) -> bool:
        return self.is_array() and self.runs[0][0].local

    def is_array(self) -> bool:
        """Whether the bytes are an array as they lie there: in one run, native-endian and aligned."""
        alignment = self.layout.alignment
        return len(self.runs) == 1 and alignment > 0 and self.runs[0][1] % alignment == 0

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        for _, array in mapped([(0, self, box)] if mmap else ()):
            return array
        out = self.room(box)
        self.fill(out, box)
        return self.made(out)

    def in_file(self, box: Box) -> list[Range]:
        """The ranges in the file of a box of an array that can be mapped; [] for a box without elements."""
        begin = self.runs[0][1]
        if box == self.layout.box:
            return [(begin, begin + self.layout.nbytes)]
        spans = self._spans(box) if math.prod(box_shape(box)) else ()
        return [(begin + first, begin + last) for first, last in map(self._range, spans)]

    def view(self, memory: mmap.mmap, box: Box) -> np.ndarray:
        """A box as an array that shares the memory of its mapped file."""
        about = self.layout
        array = np.ndarray(about.shape, about.dtype, memory, self.runs[0][1])
        return array if box == about.box else array[(*slices(box, about.box), ...)]

    def room(self, box: Box) -> np.ndarray:
        """Memory for a box, in the dtype of the file."""
        return adoptable(box_shape(box), self.layout.stored)

    def fill(self, out: np.ndarray, box: Box) -> None:
        """Reads a box into memory from `room`."""
        if out.size and box == self.layout.box:
            self._read_bytes(0, out.reshape(-1).view(np.uint8).data)
        elif out.size:
            for part in self._spans(box):
                self._read_span(part, out[(*slices(part, box), ...)])  # a view, of 0-d arrays too

    def made(self, out: np.ndarray) -> np.ndarray:
        """Memory that `fill` has filled, as an array of this machine's byte order."""
        return _native(out, self.layout)

    def _spans(self, box: Box) -> Iterator[Box]:
        """The parts of a box that are read at a time."""
        for rows in rows_apart(self.layout.shape, box, self.layout.stored.itemsize, _GAP):
            first, last = self._range(rows)
            axis = next((n for n, (start, stop) in enumerate(rows) if stop - start > 1), None)
            if axis is None or last - first <= _SPAN or rows == self.layout.box:
                yield rows
                continue
            start, stop = rows[axis]
            step = max(1, (stop - start) * _SPAN // (last - first))
            for begin in range(start, stop, step):
                yield (*rows[:axis], (begin, min(begin + step, stop)), *rows[axis + 1 :])

    def _range(self, box: Box) -> tuple[int, int]:
        """The range of bytes from the first to the last element of a box, which must have elements."""
        itemsize = self.layout.stored.itemsize
        strides = [itemsize * math.prod(self.layout.shape[axis + 1 :]) for axis in range(len(self.layout.shape))]
        first = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
        last = sum((stop - 1) * stride for (_, stop), stride in zip(box, strides, strict=True))
        return first, last + itemsize

    def _read_span(self, box: Box, target: np.ndarray) -> None:
        first, last = self._range(box)
        if last - first == target.nbytes and target.flags.c_contiguous:
            self._read_bytes(first, target.reshape(-1).view(np.uint8).data)
            return
        memory = np.empty(last - first, np.uint8)
        self._read_bytes(first, memory.data)
        itemsize = self.layout.stored.itemsize
        strides = tuple(itemsize * math.prod(self.layout.shape[axis + 1 :]) for axis in range(len(self.layout.shape)))
        target[...] = np.ndarray(box_shape(box), self.layout.stored, memory, 0, strides)

    def _read_bytes(self, begin: int, target: memoryview) -> None:
        position = 0
        for file, offset, size in self.runs:
            first, last = max(begin, position), min(begin + len(target), position + size)
            if first < last:
                file.read_into(target[first - begin : last - begin], offset + first - position)
            position += size


def mapped(wanted: Iterable[tuple[int, Runs, Box]]) -> Iterator[tuple[int, np.ndarray]]:
    """Those of the numbered boxes that can be views of private mappings of their files. Their pages are read once.

    Raises `CorruptError` for files that cannot be read.
    """
    by_file: dict[Blob, list[tuple[int, Runs, Box]]] = {}
    for one in wanted:
        if one[1].layout.nbytes and one[1].is_array():
            by_file.setdefault(one[1].runs[0][0], []).append(one)
    for file, boxes in by_file.items():
        ranges = merge([part for _, array, box in boxes for part in array.in_file(box)])
        if (memory := file.mapped(ranges)) is not None:
            file.bring_all_in(memory, ranges)
            for n, array, box in boxes:
                yield n, array.view(memory, box)


class Small:
    """Whole arrays that are so small that they are read together, and copied: none keeps the memory of others alive."""

    def __init__(self) -> None:
        self._wanted: dict[Blob, list[tuple[int, int, Layout]]] = {}  # offsets, and the numbers that were given

    def take(self, array: Any, box: Box, number: int) -> bool:
        """Whether a box is such an array; if so, `read` will read it."""
        if type(array) is not Runs:
            return False
        runs, about = array.runs, array.layout
        if not 0 < about.nbytes <= _SMALL_ARRAY_BYTES or len(runs) != 1 or box != about.box:
            return False
        file, offset, _ = runs[0]
        self._wanted.setdefault(file, []).append((offset, number, about))
        return True

    def read(self) -> Iterator[tuple[int, np.ndarray]]:
        """The arrays with their numbers, each in memory of its own."""
        memory = np.empty(_TOGETHER, np.uint8).data if self._wanted else memoryview(b"")
        for file, wanted in self._wanted.items():
            for begin, end, part in _close_together(sorted(wanted)):
                file.read_into(memory[: end - begin], begin)
                for offset, number, about in part:
                    array = np.ndarray(about.shape, about.stored, memory, offset - begin).copy()
                    yield number, _native(array, about)


def _close_together(wanted: list[tuple[int, int, Layout]]) -> Iterator[tuple[int, int, list[tuple[int, int, Layout]]]]:
    """The wanted arrays in parts that lie close together, with the range in which each part lies."""
    begin = end = wanted[0][0]
    part: list[tuple[int, int, Layout]] = []
    for one in wanted:
        offset, behind = one[0], one[0] + one[2].nbytes
        if behind > begin + _TOGETHER or offset > end + _BETWEEN:
            yield begin, end, part
            begin, end, part = offset, behind, []
        part.append(one)
        end = max(end, behind)
    yield begin, end, part


def _native(array: np.ndarray, about: Layout) -> np.ndarray:
    """An array that was read, in this machine's byte order and its final dtype."""
    if about.stored is about.dtype:
        return array
    return array.astype(about.stored.newbyteorder("="), copy=False).view(about.dtype)
