"""Reads arrays whose elements are plain bytes of files, in one run of bytes or in several."""

import functools
import math
import mmap
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from ..._core.boxes import Box, box_shape, full_box, slices, split_at_gaps
from ...errors import CorruptError, UnsafeError
from ...stores.buffers import Range, empty_aligned_array, merge, strided_arrays
from ...stores.store import Blob

_MAX_ELEMENTS = 1 << 58  # elements of an array; NumPy counts bytes in 63 bits
_MAX_GAP_BYTES = 1 << 20  # between rows; a gap up to this size costs less to read than a second call
_MAX_SPAN_BYTES = 64 << 20  # that one call reads of an array of which only a part is wanted
# Arrays up to this size are read together with their neighbors: a call would take longer than copying one of them.
_SMALL_ARRAY_BYTES = 32 << 10
_MAX_SMALL_GAP_BYTES = 4 << 10  # between two small arrays that are read by one call
_BYTE = np.dtype(np.uint8)
_BATCH_BYTES = 256 << 10  # of small arrays that are read by one call; fits in the processor's cache


def check_shape(shape: tuple[int, ...], name: str) -> None:
    """Raises `UnsafeError` for a shape that no array can have, not even an empty one."""
    if len(shape) > 64 or min(shape, default=0) < 0 or math.prod(size or 1 for size in shape) >= _MAX_ELEMENTS:
        raise UnsafeError(f"{name}: no array can have the shape {list(shape)!s:.200}")


class ExtentLayout(msgspec.Struct, frozen=True, gc=False):
    """The layout of all arrays of one shape and dtype.

    `stored` is the dtype in the file, in either byte order. `dtype` has the same size and is the dtype of the result.
    """

    shape: tuple[int, ...]
    stored: np.dtype[Any]
    dtype: np.dtype[Any]
    nbytes: int
    box: Box
    alignment: int  # in bytes, that a view of the file needs; 0 if the byte order rules out a view


def layout(shape: tuple[int, ...], stored: Any, dtype: Any, name: str) -> ExtentLayout:
    """Returns a layout. Raises an `UnsafeError` that begins with `name` for a shape that no array can have."""
    stored = np.dtype(stored)
    dtype = np.dtype(stored.newbyteorder("=") if dtype is None else dtype)
    # Equal dtypes become one object, so that `_to_native_order` compares them with `is`.
    stored = dtype if stored == dtype else stored
    check_shape(shape, name)
    alignment = dtype.alignment if stored.isnative else 0
    return ExtentLayout(shape, stored, dtype, math.prod(shape) * stored.itemsize, full_box(shape), alignment)


class Runs(msgspec.Struct, frozen=True, gc=False):
    """An array whose bytes, in C order, are the concatenation of `runs`. Each run is a file, an offset and a size.

    `of` makes one from checked runs.
    """

    runs: tuple[tuple[Blob, int, int], ...]
    layout: ExtentLayout

    @staticmethod
    def of(runs: Sequence[tuple[Blob, int, int]], shape: tuple[int, ...], stored: Any, dtype: Any = None) -> "Runs":
        """Returns an array of these runs.

        Raises `CorruptError` unless the runs are inside their files and have the size of the array, and `UnsafeError`
        for a shape that no array can have.
        """
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
        """Returns True if the bytes in the file can be used as an array: one run, native-endian and aligned."""
        alignment = self.layout.alignment
        return len(self.runs) == 1 and alignment > 0 and self.runs[0][1] % alignment == 0

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        found: list[Any] = [None]
        fill_mapped([(0, self, box)] if mmap else [], found)
        if found[0] is not None:
            return found[0]
        out = self.room(box)
        self.fill(out, box)
        return self.made(out)

    def in_file(self, box: Box) -> list[Range]:
        """Returns the byte ranges of a box in the file; none for an empty box. The array must be mappable."""
        begin = self.runs[0][1]
        if box == self.layout.box:
            return [(begin, begin + self.layout.nbytes)]
        spans = self._spans(box) if math.prod(box_shape(box)) else ()
        return [(begin + first, begin + last) for first, last in map(self._range, spans)]

    def view(self, memory: mmap.mmap, box: Box) -> np.ndarray:
        """Returns a box as an array that shares the memory of the mapped file."""
        about = self.layout
        array = np.ndarray(about.shape, about.dtype, memory, self.runs[0][1])
        return array if box == about.box else array[(*slices(box, about.box), ...)]

    def room(self, box: Box) -> np.ndarray:
        """Returns new memory for a box, in the dtype of the file."""
        return empty_aligned_array(box_shape(box), self.layout.stored)

    def fill(self, out: np.ndarray, box: Box) -> None:
        """Reads a box into memory from `room`."""
        for part in fill_parts(self, out, box):
            part()

    def made(self, out: np.ndarray) -> np.ndarray:
        """Returns memory that `fill` has filled, as an array in this machine's byte order."""
        return _to_native_order(out, self.layout)

    def _spans(self, box: Box) -> Iterator[Box]:
        """Yields the parts of a box that are each read by one call."""
        for rows in split_at_gaps(self.layout.shape, box, self.layout.stored.itemsize, _MAX_GAP_BYTES):
            first, last = self._range(rows)
            axis = next((n for n, (start, stop) in enumerate(rows) if stop - start > 1), None)
            if axis is None or last - first <= _MAX_SPAN_BYTES or rows == self.layout.box:
                yield rows
                continue
            start, stop = rows[axis]
            step = max(1, (stop - start) * _MAX_SPAN_BYTES // (last - first))
            for begin in range(start, stop, step):
                yield (*rows[:axis], (begin, min(begin + step, stop)), *rows[axis + 1 :])

    def _range(self, box: Box) -> tuple[int, int]:
        """Returns the range of bytes from the first to the last element of a box, which must not be empty."""
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


def fill_parts(array: Runs, out: np.ndarray, box: Box) -> Iterator[Callable[[], None]]:
    """Yields the parts of `Runs.fill`, which several threads may call."""
    if out.size and box == array.layout.box:
        data = out.reshape(-1).view(np.uint8).data
        file = array.runs[0][0]
        step = file.read_bytes * file.readers  # a bucket requests so many bytes at once
        for begin in range(0, len(data), step):
            yield functools.partial(array._read_bytes, begin, data[begin : begin + step])
    elif out.size:
        for part in array._spans(box):
            # The ellipsis makes this a view even of an array without axes, where indexing would copy the element.
            yield functools.partial(array._read_span, part, out[(*slices(part, box), ...)])


Wanted = Sequence[tuple[int, Runs, Box]]  # boxes of arrays, numbered
_Entire = tuple[
    int, int, ExtentLayout
]  # an array of which everything is wanted: its offset in a file, number and layout
_offset = operator.itemgetter(0)


def fill_mapped(wanted: Wanted, found: list[Any]) -> None:
    """Stores the boxes that can be views of private file mappings in `found`, at their numbers.

    Loads their pages now. Raises `CorruptError` for files that cannot be read.
    """
    entire, rest = _by_file(wanted, aligned=True)
    boxes: dict[Blob, list[tuple[int, Runs, Box]]] = {}
    for one in rest:
        if one[1].layout.nbytes and one[1].is_array():
            boxes.setdefault(one[1].runs[0][0], []).append(one)
    for file in entire.keys() | boxes.keys():
        runs, parts = list(_equal_strides(entire.get(file, []))), boxes.get(file, [])
        ranges = [part for run, stride in runs for part in _ranges(run, stride)]
        ranges = merge([*ranges, *(part for _, array, box in parts for part in array.in_file(box))])
        if (memory := file.mapped(ranges)) is not None:
            file.populate(memory, ranges)
            for n, array, box in parts:
                found[n] = array.view(memory, box)
            for run, stride in runs:
                _place_arrays(run, found, memory, run[0][0], stride)


def fill_small(wanted: Wanted, found: list[Any]) -> Wanted:
    """Reads the small arrays of which everything is wanted, several per call, and stores them in `found`.

    Copies them to aligned memory that arrays of one layout share. A reference to one of them therefore keeps at most
    256 KiB alive. Returns the wanted boxes that were not read.
    """
    entire, rest = _by_file(wanted, max_nbytes=_SMALL_ARRAY_BYTES)
    memory = np.empty(_BATCH_BYTES, np.uint8).data if entire else memoryview(b"")
    for file, own in entire.items():
        for begin, end, part in _nearby_runs(own):
            file.read_into(memory[: end - begin], begin)
            for run, stride in _equal_strides(part):
                offset, _, about = run[0]
                room = empty_aligned_array((len(run), about.nbytes), _BYTE)
                room[...] = np.ndarray(room.shape, _BYTE, memory, offset - begin, (stride, 1))
                _place_arrays(run, found, room, 0, about.nbytes)
    return rest


def _by_file(
    wanted: Wanted, *, max_nbytes: int = sys.maxsize, aligned: bool = False
) -> tuple[dict[Blob, list[_Entire]], Wanted]:
    """Returns the arrays that are one run, wanted entirely and not too large, by file in file order; and the rest."""
    found: dict[Blob, list[_Entire]] = {}
    rest: list[tuple[int, Runs, Box]] = []
    for one in wanted:
        n, array, box = one
        about, runs = array.layout, array.runs
        if len(runs) != 1 or box != about.box or not 0 < about.nbytes <= max_nbytes:
            rest.append(one)
            continue
        file, offset, _ = runs[0]
        if aligned and (not about.alignment or offset % about.alignment):
            rest.append(one)
        else:
            found.setdefault(file, []).append((offset, n, about))
    for own in found.values():
        own.sort(key=_offset)  # The sort is stable, so arrays at one offset stay in the order of the request.
    return found, rest


def _equal_strides(wanted: list[_Entire]) -> Iterator[tuple[list[_Entire], int]]:
    """Yields runs of arrays with one layout at equal distances, with the distance. A run is handled as one array."""
    first, count = 0, len(wanted)
    while first < count:
        begin, _, about = wanted[first]
        last = first + 1
        stride = wanted[last][0] - begin if last < count else 0
        place = begin + stride
        while last < count and wanted[last][2] is about and wanted[last][0] == place:
            last += 1
            place += stride
        yield wanted[first:last], stride
        first = last


def _ranges(run: list[_Entire], stride: int) -> list[Range]:
    """Returns the byte ranges of a run of arrays in their file."""
    first, _, about = run[0]
    if stride <= about.nbytes:
        return [(first, run[-1][0] + about.nbytes)]
    return [(offset, offset + about.nbytes) for offset, _, _ in run]


def _place_arrays(run: list[_Entire], found: list[Any], memory: Any, begin: int, stride: int) -> None:
    """Stores the arrays of a run in `found`, as views of memory in which the run starts at byte `begin`."""
    about = run[0][2]
    arrays = strided_arrays(memory, begin, len(run), about.shape, about.stored, stride)
    if about.stored is not about.dtype:
        arrays = [_to_native_order(array, about) for array in arrays]
    for (_, n, _), array in zip(run, arrays, strict=True):
        found[n] = array


def _nearby_runs(wanted: list[_Entire]) -> Iterator[tuple[int, int, list[_Entire]]]:
    """Splits the wanted arrays into groups for one call each. Yields the byte range of each group with its arrays."""
    begin = end = wanted[0][0]
    part: list[_Entire] = []
    for one in wanted:
        offset, stop = one[0], one[0] + one[2].nbytes
        if stop > begin + _BATCH_BYTES or offset > end + _MAX_SMALL_GAP_BYTES:
            yield begin, end, part
            begin, end, part = offset, stop, []
        part.append(one)
        end = max(end, stop)
    yield begin, end, part


def _to_native_order(array: np.ndarray, about: ExtentLayout) -> np.ndarray:
    """Returns an array that was read, in this machine's byte order and its final dtype."""
    if about.stored is about.dtype:
        return array
    return array.astype(about.stored.newbyteorder("="), copy=False).view(about.dtype)
