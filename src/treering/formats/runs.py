"""Arrays that lie in files as plain bytes, in one run or in several."""

import contextlib
import math
import mmap
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .._sharding import Box, extent, rows_apart, slices, whole
from ..errors import CorruptError, UnsafeError
from ..stores.buffers import adoptable
from ..stores.disk import Disk

_MOST = 1 << 58  # elements of an array; NumPy counts bytes in 63 bits
_GAP = 1 << 20  # bytes between rows up to which reading them as well is cheaper than another call
_SPAN = 64 << 20  # bytes that are read at a time of an array of which not everything is wanted

_call = threading.local()


@contextlib.contextmanager
def mapped_once() -> Iterator[None]:
    """Within it each file is mapped once, for all arrays that are read: Linux allows a process 65,530 mappings."""
    before = getattr(_call, "mappings", None)
    _call.mappings = {}
    try:
        yield
    finally:
        _call.mappings = before


class File:
    """A file that stays open, so that it can be read even after somebody has replaced or deleted it."""

    def __init__(self, disk: Disk, path: str):
        self.path = path
        self._disk = disk
        self._fd = disk.open(path)
        self._close = weakref.finalize(self, disk.close, self._fd)
        self.size = disk.size(self._fd)
        self.local = disk.is_local(self._fd)

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fills a buffer from an offset. Raises `CorruptError` when the file ends before."""
        if self._disk.read(self._fd, target, offset) != len(target):
            raise CorruptError(f"{self.path}: expected {offset + len(target)} bytes, found fewer; it is cut short")

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the file. Raises `CorruptError` when it ends before; nothing is reserved for a size it has not."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise CorruptError(f"{self.path}: expected {offset + nbytes} bytes, found {self.size}; it is cut short")
        data = bytearray(nbytes)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def mapped(self) -> mmap.mmap:
        """A private mapping of the whole file: one's own, or that of all who ask within `mapped_once`."""
        known: dict[File, mmap.mmap] | None = getattr(_call, "mappings", None)
        known = {} if known is None else known
        if self not in known:
            if self._disk.size(self._fd) < self.size:
                raise CorruptError(f"{self.path}: expected {self.size} bytes; it was cut short while open")
            known[self] = self._disk.map(self._fd, self.size)
        return known[self]


def check_shape(shape: tuple[int, ...], name: str) -> None:
    """Raises `UnsafeError` for what is the shape of no array, be it an empty one."""
    if len(shape) > 64 or min(shape, default=0) < 0 or math.prod(size or 1 for size in shape) >= _MOST:
        raise UnsafeError(f"{name}: no array can have the shape {list(shape)}")


class Runs:
    """An array whose C-ordered bytes are these runs, in order: file, offset and size of each.

    `stored` is the dtype in the file, of either byte order; what is read is `dtype`, of the same size.
    """

    def __init__(self, runs: Sequence[tuple[File, int, int]], shape: tuple[int, ...], stored: Any, dtype: Any = None):
        self._runs, self._shape, self._stored = runs, shape, np.dtype(stored)
        self._dtype = np.dtype(dtype) if dtype is not None else self._stored.newbyteorder("=")
        check_shape(shape, runs[0][0].path if runs else "")
        nbytes = math.prod(shape) * self._stored.itemsize
        for file, offset, size in runs:
            if offset < 0 or size < 0 or offset + size > file.size:
                raise CorruptError(f"{file.path}: expected {offset + size} bytes, found {file.size}; it is cut short")
        if sum(size for _, _, size in runs) != nbytes:
            found = sum(size for _, _, size in runs)
            raise CorruptError(f"{runs[0][0].path if runs else ''}: expected {nbytes} bytes of an array, found {found}")

    def can_map(self) -> bool:
        return self._is_array() and all(file.local for file, _, _ in self._runs)

    def _is_array(self) -> bool:
        """Whether the bytes are an array as they lie there: in one run, native-endian and aligned."""
        aligned = all(offset % self._dtype.alignment == 0 for _, offset, _ in self._runs)
        return len(self._runs) <= 1 and self._stored.isnative and aligned

    def read(self, box: Box, map: bool) -> np.ndarray:
        if map and len(self._runs) == 1 and self._is_array() and math.prod(self._shape):
            file, offset, _ = self._runs[0]
            return np.ndarray(self._shape, self._dtype, file.mapped(), offset)[(*slices(box, whole(self._shape)), ...)]
        out = adoptable(extent(box), self._stored)
        if out.size and box == whole(self._shape):
            self._read_bytes(0, out.reshape(-1).view(np.uint8).data)
        elif out.size:
            for part in self._spans(box):
                self._read_span(part, out[(*slices(part, box), ...)])  # a view, of 0-d arrays too
        return out.astype(out.dtype.newbyteorder("="), copy=False).view(self._dtype)

    def _spans(self, box: Box) -> Iterator[Box]:
        """The parts of a box that are read at a time."""
        for rows in rows_apart(self._shape, box, self._stored.itemsize, _GAP):
            first, last = self._range(rows)
            axis = next((n for n, (start, stop) in enumerate(rows) if stop - start > 1), None)
            if axis is None or last - first <= _SPAN or rows == whole(self._shape):
                yield rows
                continue
            start, stop = rows[axis]
            step = max(1, (stop - start) * _SPAN // (last - first))
            for begin in range(start, stop, step):
                yield (*rows[:axis], (begin, min(begin + step, stop)), *rows[axis + 1 :])

    def _range(self, box: Box) -> tuple[int, int]:
        """From the first to the last byte of a box that has elements."""
        itemsize = self._stored.itemsize
        strides = [itemsize * math.prod(self._shape[axis + 1 :]) for axis in range(len(self._shape))]
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
        itemsize = self._stored.itemsize
        strides = tuple(itemsize * math.prod(self._shape[axis + 1 :]) for axis in range(len(self._shape)))
        target[...] = np.ndarray(extent(box), self._stored, memory, 0, strides)

    def _read_bytes(self, begin: int, target: memoryview) -> None:
        position = 0
        for file, offset, size in self._runs:
            first, last = max(begin, position), min(begin + len(target), position + size)
            if first < last:
                file.read_into(target[first - begin : last - begin], offset + first - position)
            position += size
