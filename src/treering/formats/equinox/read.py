"""Reading Equinox's files: the headers of all records when a file is opened, the arrays when they are wanted."""

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box
from ..._core.entries import ArrayEntry
from ...errors import CorruptError, UnsafeError, UnsupportedError
from ...stores.store import Blob, Store
from ...stores.whole_files import open_fetched
from .._shared.extents import Runs
from .._shared.reader import ForeignReader, Stored
from .schema import MAGIC, NAME, line_before

_WINDOW = 4 << 10  # bytes that are read at a time while headers are looked for
_MAX_HEADER_BYTES = 1 << 16  # bytes of a header
_SHAPE = r"\(((?:\d{1,19}L?, *)*(?:\d{1,19}L?)?)\)"
_HEADER = re.compile(
    rf"\{{'descr': *('[^']*'|\[.*\]), *'fortran_order': *(True|False), *'shape': *{_SHAPE},? *\}}\s*", re.DOTALL
)
_DTYPE = re.compile(r"[<>|=]?(?:[biufc]\d{1,2}|[SU]\d{1,8}|[mM]8(?:\[\w{1,9}\])?)")
# Dtypes for which NumPy has no names. Of two bytes there is one, as JAX takes for granted, too; many have one byte.
_NAMELESS = {"V2": "bfloat16", "f1": "float8_e5m2", "V1": "uint8"}


class _Record(NamedTuple):
    """A header. `dtype` is the text of the dtype that is read; `certain` says whether it is the saved one."""

    stored: np.dtype
    dtype: str
    certain: bool
    columns: bool
    shape: tuple[int, ...]


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


def _records(file: Blob, position: int) -> Iterator[tuple[int, _Record]]:
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
        where = f"{file.path}: record {number}, at {position}"
        magic = take(8)
        if not magic.startswith(MAGIC) or magic[6] not in (1, 2, 3):
            raise CorruptError(f"{where}: expected an .npy record, found {magic!r}")
        size = int.from_bytes(take(2 if magic[6] == 1 else 4), "little")
        if size > _MAX_HEADER_BYTES:
            raise UnsafeError(f"{where}: a header of {size} bytes")
        try:
            record = _parse(take(size))
        except (CorruptError, UnsupportedError) as error:
            raise type(error)(f"{where}: {error}") from None
        yield position, record
        position += math.prod(record.shape) * record.stored.itemsize
        number += 1
    if position > file.size:
        raise CorruptError(f"{file.path}: expected {position} bytes, found {file.size}; it is cut short")


@functools.lru_cache(maxsize=1024)
def _parse(header: bytes) -> _Record:
    match = _HEADER.fullmatch(header.decode("latin1"))
    if match is None:
        raise CorruptError(f"expected the header of an .npy record, found {header!r:.200}")
    descr, shape = match[1].strip("'"), tuple(int(size.rstrip("L")) for size in re.findall(r"\d+L?", match[3]))
    columns = match[2] == "True"
    if descr.endswith("O"):
        raise UnsupportedError("a pickled Python object, which is never opened; load it with NumPy if you trust it")
    if nameless := _NAMELESS.get(descr.lstrip("<>|=")):
        stored = np.dtype(f"{'>' if descr[0] == '>' else '<'}u{descr[-1]}")
        return _Record(stored, nameless, nameless != "uint8", columns, shape)
    try:
        stored = np.dtype(descr) if _DTYPE.fullmatch(descr) else None
    except (TypeError, ValueError):
        stored = None
    if stored is None:
        raise UnsupportedError(f"arrays of dtype {descr:.100} cannot be read here")
    return _Record(stored, dtypes.to_text(stored), True, columns, shape)
