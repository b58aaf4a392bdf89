"""Parses the types of HDF5's arrays."""

import struct
from typing import Any, NamedTuple

import numpy as np

from ..._core import dtypes
from ...errors import UnsupportedError

_FIXED, _FLOAT, _TEXT, _OPAQUE, _ENUM = 0, 1, 3, 5, 8  # classes of types
_REFUSED = {
    **{_FIXED: "integers with another layout than NumPy's", _FLOAT: "floats with another layout than NumPy's"},
    **{_TEXT: "text that is not padded with zeros", _ENUM: "an enumeration", 2: "times", 4: "bit fields"},
    **{6: "records (a compound type)", 7: "references", 9: "text or lists of any length", 10: "arrays in an array"},
}
# Sign, place and size of the exponent, place and size of the mantissa, bias: by the dtype that has them.
_FLOATS: dict[tuple[int, ...], str] = {
    (15, 10, 5, 0, 10, 15): "float16",
    (31, 23, 8, 0, 23, 127): "float32",
    (63, 52, 11, 0, 52, 1023): "float64",
    (15, 7, 8, 0, 7, 127): "bfloat16",
}
_OPAQUES = {1: "uint8", 2: "bfloat16"}  # for values of so many bytes whose dtype no attribute names, as in .npz files
_IMPLIED = 2  # the highest bit of the mantissa is not stored
_NULL_PADDED = 1
_MAX_TEXT_BYTES = 99_999_999  # of the longest dtype of text that `dtypes` knows


class TypeRefused(Exception):
    """Says which type an array has that cannot be read here."""


class Kind(NamedTuple):
    """The dtype of an array in a file and, as text, of the result.

    `certain` is False if another dtype of that size may have been saved. `named` is True if an attribute said it.
    """

    stored: np.dtype
    dtype: str
    certain: bool = True
    named: bool = False


def parse_type(data: bytes, name: Any) -> Kind:
    """Returns the dtype of a Datatype message. Raises `TypeRefused`.

    name: the attribute ``dtype``, in which Keras says which dtype its opaque values have.
    """
    kind, bits, nbytes = data[0] & 15, int.from_bytes(data[1:4], "little"), struct.unpack_from("<I", data, 4)[0]
    order = ">" if bits & 1 else "<"
    if kind == _FIXED and nbytes in (1, 2, 4, 8) and struct.unpack_from("<HH", data, 8) == (0, 8 * nbytes):
        return _plain(np.dtype(f"{order}{'i' if bits & 8 else 'u'}{nbytes}"))
    if kind == _FLOAT and not bits & 0x40:
        first, precision, *rest, bias = struct.unpack_from("<HHBBBBI", data, 8)
        found = _FLOATS.get((bits >> 8 & 255, *rest, bias))
        final = None if found is None else dtypes.to_numpy(found)
        plain = (first, precision, bits >> 4 & 3) == (0, 8 * nbytes, _IMPLIED)
        if final is not None and plain and final.itemsize == nbytes:
            stored = np.dtype(f"u{nbytes}" if final.kind == "V" else final).newbyteorder(order)
            return Kind(stored, dtypes.to_text(final))
    if kind == _TEXT and bits & 15 == _NULL_PADDED and nbytes:
        if nbytes > _MAX_TEXT_BYTES:
            raise TypeRefused(f"text of {nbytes} bytes")
        return _plain(np.dtype(f"S{nbytes}"))
    if kind == _ENUM and _is_bool(data, bits & 0xFFFF, nbytes):
        return _plain(np.dtype(bool))
    if kind == _OPAQUE:
        final = _named(name, nbytes)
        if final is not None:
            return Kind(np.dtype(f"<u{nbytes}"), dtypes.to_text(final), named=True)
        if name is None and nbytes in _OPAQUES:
            return Kind(np.dtype(f"<u{nbytes}"), _OPAQUES[nbytes], certain=nbytes == 2)
        raise TypeRefused(f"opaque values of {nbytes} bytes" + (f" with the dtype {name!r:.50}" if name else ""))
    raise TypeRefused(_REFUSED.get(kind, f"values of the type {kind} of HDF5"))


def _plain(dtype: np.dtype) -> Kind:
    return Kind(dtype, dtypes.to_text(dtype))


def _named(name: Any, nbytes: int) -> np.dtype | None:
    """Returns the dtype with a name and size, if it is one that NumPy itself lacks."""
    try:
        found = dtypes.to_numpy(name) if isinstance(name, str) else None
    except UnsupportedError:
        return None
    return found if found is not None and found.kind == "V" and found.itemsize == nbytes else None


def _is_bool(data: bytes, members: int, nbytes: int) -> bool:
    """Returns True for the enumeration that h5py makes of bool: FALSE and TRUE, numbers of one byte."""
    base = data[8:20]
    if members != 2 or nbytes != 1 or base[0] & 15 != _FIXED:
        return False
    return data[20:].replace(b"\0", b"") == b"FALSETRUE\1"
