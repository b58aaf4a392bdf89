"""Reads the headers of NumPy's files (.npy). NumPy's own reader is not used: it evaluates headers and opens pickles."""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..._core import dtypes
from ...errors import CorruptError, UnsafeError, UnsupportedError
from .unknown_files import NPY_MAGIC

_MAX_HEADER_BYTES = 1 << 16
_SHAPE = r"\(((?:\d{1,19}L?, *)*(?:\d{1,19}L?)?)\)"
_HEADER = re.compile(
    rf"\{{'descr': *('[^']*'|\[.*\]), *'fortran_order': *(True|False), *'shape': *{_SHAPE},? *\}}\s*", re.DOTALL
)
DTYPE = re.compile(r"[<>|=]?(?:[biufc]\d{1,2}|[SU]\d{1,8}|[mM]8(?:\[(?!0)\w{1,9}\])?)")
# Dtypes for which NumPy has no names. Only one of them has two bytes, which JAX assumes too. Several have one byte, so
# those are read as the default below and marked as not certain.
_NAMELESS = {"V2": "bfloat16", "f1": "float8_e5m2", "V1": "uint8"}


class Record(NamedTuple):
    """A parsed header. `dtype` is the text of the dtype of the result.

    `certain` is False if the saved dtype may have been another of the same size. `columns` is True for Fortran order.
    """

    stored: np.dtype
    dtype: str
    certain: bool
    columns: bool
    shape: tuple[int, ...]


def read_header(take: Callable[[int], bytes], where: str) -> Record:
    """Reads the header of an array. The bytes of the array follow it.

    take: returns the next `n` bytes.
    where: the beginning of error messages.

    Raises `CorruptError`, `UnsafeError` and `UnsupportedError`.
    """
    magic = take(8)
    if not magic.startswith(NPY_MAGIC) or magic[6] not in (1, 2, 3):
        raise CorruptError(f"{where}: expected an .npy record, found {magic!r}")
    size = int.from_bytes(take(2 if magic[6] == 1 else 4), "little")
    if size > _MAX_HEADER_BYTES:
        raise UnsafeError(f"{where}: expected a header of at most {_MAX_HEADER_BYTES} bytes, found {size}")
    try:
        return _parse(take(size))
    except (CorruptError, UnsupportedError) as error:
        raise type(error)(f"{where}: {error}") from None


@functools.lru_cache(maxsize=1024)
def _parse(header: bytes) -> Record:
    match = _HEADER.fullmatch(header.decode("latin1"))
    if match is None:
        raise CorruptError(f"expected the header of an .npy record, found {header!r:.200}")
    descr, shape = match[1].strip("'"), tuple(int(size.rstrip("L")) for size in re.findall(r"\d+L?", match[3]))
    columns = match[2] == "True"
    if descr.endswith("O"):
        raise UnsupportedError("a pickled Python object, which is never opened; load it with NumPy if you trust it")
    if nameless := _NAMELESS.get(descr.lstrip("<>|=")):
        stored = np.dtype(f"{'>' if descr[0] == '>' else '<'}u{descr[-1]}")
        return Record(stored, nameless, nameless != "uint8", columns, shape)
    try:
        stored = np.dtype(descr) if DTYPE.fullmatch(descr) else None
    except (TypeError, ValueError):
        stored = None
    if stored is None:
        raise UnsupportedError(f"arrays of dtype {descr:.100} cannot be read here")
    return Record(stored, dtypes.to_text(stored), True, columns, shape)
