"""Reading Equinox's files: the headers of all records when a file is opened, the arrays when they are wanted."""

import math
from collections.abc import Iterator

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box
from ..._core.entries import ArrayEntry
from ...errors import CorruptError
from ...stores.store import Blob, Store
from ...stores.whole_files import open_fetched
from .._shared.extents import Runs
from .._shared.npy import Record, read_header
from .._shared.reader import ForeignReader, Stored
from .schema import NAME, line_before

_WINDOW = 4 << 10  # bytes that are read at a time while headers are looked for


class EquinoxReader(ForeignReader):
    """The entries are ``0``, ``1``, … in the order of the file, which is that of the template's array-like leaves.

    `positional` says so: a leaf of a template is array-like when it is an array, a NumPy scalar, or a Python bool, int,
    float or complex, which are 0-d arrays here. Others have no record.

    `ambiguous_dtypes` are the paths of arrays that are listed as uint8 and hold bytes of a dtype that the file does not
    give: float8, int4 and others of one byte (not float8_e5m2, which it does give). A template says which.
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
    """An array that lies there in Fortran's order."""

    def __init__(self, transposed: Runs):
        self._transposed = transposed

    def can_map(self) -> bool:
        return False

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        return np.ascontiguousarray(self._transposed.read(box[::-1], False).transpose())


def _records(file: Blob, position: int) -> Iterator[tuple[int, Record]]:
    """The offset of the bytes of each array, and its header."""
    window, start = b"", 0

    def take(size: int) -> bytes:
        nonlocal window, start, position
        if position + size > start + len(window):
            start = position
            window = file.read(position, min(max(size, _WINDOW), file.size - position))
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
