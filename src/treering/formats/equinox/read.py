"""Reads Equinox's files: all headers when a file is opened, each array when it is requested."""

import math
from collections.abc import Iterator

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box
from ..._core.entries import ArrayEntry
from ...errors import CorruptError
from ...stores.file_io import open_fetched
from ...stores.store import Blob, Store
from .._shared.extents import Runs
from .._shared.npy import Record, read_header
from .._shared.reader import ForeignReader, Stored
from .schema import NAME, line_before

_WINDOW_BYTES = 4 << 10  # bytes that are read at a time while looking for headers


class EquinoxReader(ForeignReader):
    """Lists the records as ``0``, ``1``, … in the file's order, which is that of the template's array-like leaves.

    `positional` states that. A template's leaf is array-like if it is an array, a NumPy scalar, or a Python bool, int,
    float or complex; the latter are arrays without axes in the file. Other leaves have no record.

    `ambiguous_dtypes` holds the paths of arrays that are listed as uint8, but whose dtype of one byte the file does not
    record: float8, int4 and others (float8_e5m2 is recorded). A template tells the dtype.
    """

    positional = True

    def __init__(self, store: Store, path: str):
        try:
            metadata, begin = line_before(store, path)
        except ValueError as error:
            raise CorruptError(f"{path}: expected a file of Equinox: {error}") from None
        file = open_fetched(store, path)
        entries: list[ArrayEntry] = []
        arrays: dict[str, Stored] = {}
        ambiguous: list[str] = []
        for n, (offset, record) in enumerate(_records(file, begin)):
            name, shape = str(n), record.shape
            entries.append(ArrayEntry(name, "numpy", record.dtype, shape))
            run = file, offset, math.prod(shape) * record.stored.itemsize
            dtype = dtypes.to_numpy(record.dtype)
            if record.columns and len(shape) > 1:
                arrays[name] = _Columns(Runs.of([run], shape[::-1], record.stored, dtype))
            else:
                arrays[name] = Runs.of([run], shape, record.stored, dtype)
            if not record.certain:
                ambiguous.append(name)
        self.ambiguous_dtypes = frozenset(ambiguous)
        super().__init__(NAME, path, entries, arrays, metadata=metadata, nbytes=file.size)


class _Columns:
    """Reads an array stored in Fortran order."""

    def __init__(self, transposed: Runs):
        self._transposed = transposed

    def can_map(self) -> bool:
        return False

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        return np.ascontiguousarray(self._transposed.read(box[::-1], False).transpose())


def _records(file: Blob, position: int) -> Iterator[tuple[int, Record]]:
    """Yields the offset of each array's bytes, and the array's header."""
    window, start = b"", 0

    def take(size: int) -> bytes:
        nonlocal window, start, position
        if position + size > start + len(window):
            start = position
            window = file.read(position, min(max(size, _WINDOW_BYTES), file.size - position))
        if size > start + len(window) - position:
            raise CorruptError(f"{file.path}: expected {position + size} bytes, found {file.size}; it is cut short")
        position += size
        return window[position - size - start : position - start]

    number = 0
    while position < file.size:
        record = read_header(take, f"{file.path}: record {number}, at {position}")
        yield position, record
        position += math.prod(record.shape) * record.stored.itemsize
        number += 1
    if position > file.size:
        raise CorruptError(f"{file.path}: expected {position} bytes, found {file.size}; it is cut short")
