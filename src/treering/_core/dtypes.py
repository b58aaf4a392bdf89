"""Converts dtypes to text, and says how a safetensors file stores them.

The text is the name that NumPy or ml_dtypes uses. Sizes are known here without NumPy, so that a checkpoint can be
listed without importing it.
"""

import functools
import re
from typing import TYPE_CHECKING, Any

from ..errors import MismatchError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np

SAFETENSORS = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "complex64": ("C64", 8),
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
}
# safetensors does not have these dtypes. They are stored as U8: with one byte per element, or with a last axis that has
# the bytes of an element.
_ONE_BYTE = re.compile(r"u?int[124]|float8_e4m3|float8_e3m4|float8_e4m3b11fnuz|float6_e[23]m[23]fn|float4_e2m1fn")
_COMPLEX_BYTES = {"complex128": 16, "complex32": 4, "bcomplex32": 4}
_NUMPY_DTYPES = {name for name in SAFETENSORS if not name.startswith(("float8", "bfloat16"))} | {"complex128"}
EXTENDED_HINT = "use plain numbers: for Flax's fm32, jax.lax.convert_element_type(x, 'float32')"
_UNIT = r"\[(?:[2-9]|[1-9]\d{1,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\]"
_SIZED = re.compile(rf"(datetime64|timedelta64)(?:{_UNIT})?|<U([1-9]\d{{0,7}})|\|S([1-9]\d{{0,7}})", re.ASCII)


@functools.lru_cache(maxsize=512)
def safetensors_layout(text: str) -> tuple[str, int, bool]:
    """Returns the safetensors dtype, the bytes per element, and True if a last axis of bytes is added.

    Raises `UnsupportedError` for a dtype that this version of the format does not know.
    """
    if text in SAFETENSORS:
        return *SAFETENSORS[text], False
    if _ONE_BYTE.fullmatch(text):
        return "U8", 1, False
    if text in _COMPLEX_BYTES:
        return "U8", _COMPLEX_BYTES[text], True
    if found := _SIZED.fullmatch(text):
        return "U8", 8 if found[1] else 4 * int(found[2]) if found[2] else int(found[3]), True
    raise UnsupportedError(f"dtype {text}")


@functools.lru_cache(maxsize=512)
def compute_dtype(dtype: "np.dtype[Any]") -> "type[np.float64 | np.complex128]":
    """Returns the type in which to compute with numbers of a dtype. It also knows the dtypes of ml_dtypes."""
    import numpy as np

    return np.complex128 if "complex" in dtype.name else np.float64


@functools.lru_cache(maxsize=512)
def itemsize(text: str) -> int:
    """Returns the bytes per stored element."""
    return safetensors_layout(text)[1]


@functools.lru_cache(maxsize=512)
def to_numpy(text: str) -> "np.dtype[Any]":
    """Returns the NumPy dtype of a text, in little-endian byte order. Raises `UnsupportedError` for an unknown one."""
    import numpy as np

    safetensors_layout(text)
    if text in _NUMPY_DTYPES:
        return np.dtype(text)
    import ml_dtypes  # imported late: loading it takes as long as opening a checkpoint

    try:
        return np.dtype(getattr(ml_dtypes, text, None) or text)
    except TypeError:
        raise UnsupportedError(f"dtype {text}, which this release of ml_dtypes does not know; upgrade it") from None


@functools.lru_cache(maxsize=512)
def to_text(dtype: "np.dtype[Any]") -> str:
    """Returns the text of a NumPy dtype of any byte order. Raises `UnsupportedError` if it cannot be stored."""
    if not hasattr(dtype, "kind"):
        raise UnsupportedError(f"dtype {dtype}, which only JAX has; {EXTENDED_HINT}")
    if dtype.kind == "T":
        raise UnsupportedError(f"dtype {dtype}; use fixed-width text, numpy.array(x.tolist()), or bytes")
    little = dtype.newbyteorder("<")
    text = little.str if dtype.kind in "US" else dtype.name
    if text in ("float128", "float96", "complex256", "complex192", "longdouble", "clongdouble"):
        raise UnsupportedError(f"dtype {dtype}, whose layout differs between machines; cast it")
    try:
        if to_numpy(text) == little:
            return text
    except (UnsupportedError, TypeError):
        pass
    hint = "save its fields as arrays of their own" if dtype.names else "pickled objects are never written"
    if dtype.names == ("float0",):
        hint = "gradients of integers, which have no values; use None in their place"
    if not dtype.names and not dtype.hasobject:
        hint = "bytes without a dtype; where they are numbers of ml_dtypes, say which: x.view(ml_dtypes.bfloat16)"
    raise UnsupportedError(f"dtype {dtype}; {hint}")


def requested_dtype(dtype: Any) -> "np.dtype[Any]":
    """Returns the dtype that the caller wants for floats.

    Raises `MismatchError` if it is not a dtype, and `UnsupportedError` if it is not a floating-point dtype.
    """
    import ml_dtypes  # noqa: F401  # Importing it teaches NumPy names such as bfloat16.
    import numpy as np

    try:
        found = np.dtype(dtype)
    except TypeError:
        raise MismatchError(
            f"dtype={dtype!r}: expected a floating-point dtype, such as bfloat16, float16 or float32"
        ) from None
    if not is_float(found):
        raise UnsupportedError(f"dtype={found}: expected a floating-point dtype, because only such leaves are cast")
    return found


def is_float(dtype: "np.dtype[Any]") -> bool:
    """Returns True for a real floating-point dtype, including bfloat16 and the smaller ones."""
    return dtype.kind == "f" or (dtype.kind == "V" and "float" in dtype.name)


def is_integer(dtype: "np.dtype[Any]") -> bool:
    """Returns True for an integer dtype, including int4 and int2."""
    return dtype.kind in "iu" or (dtype.kind == "V" and "int" in dtype.name)


@functools.lru_cache(maxsize=512)
def widens(old: "np.dtype[Any]", new: "np.dtype[Any]") -> bool:
    """Returns True if `new` has every value of the float or complex dtype `old`, including the signs of zeros."""
    import numpy as np

    if old.kind == "c" and new.kind == "c":
        return new.itemsize >= old.itemsize
    if not (is_float(old) and is_float(new)):
        return False
    if old.itemsize > 2:
        return new.kind == "f" and new.itemsize >= old.itemsize
    bits = int(old.name[5]) if old.name.startswith(("float4", "float6")) else 8 * old.itemsize
    every = np.arange(1 << bits, dtype=f"u{old.itemsize}").view(old)
    with np.errstate(all="ignore"):
        before = every.astype(np.float64)
        after = convert(every, new).astype(np.float64)
    same = (before == after) & (np.signbit(before) == np.signbit(after))
    return bool((same | (np.isnan(before) & np.isnan(after))).all())


def convert(array: "np.ndarray[Any, Any]", dtype: "np.dtype[Any]") -> "np.ndarray[Any, Any]":
    """Returns the array in another dtype, C-ordered. It also converts between small dtypes, which `astype` cannot.

    Values that the dtype lacks are lost without an error; `casts.cast` refuses that.
    """
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        if array.itemsize == 1 and dtype.itemsize == 1 and array.dtype != dtype:
            array = array.astype(np.int16 if is_integer(array.dtype) else np.float32)
        return array.astype(dtype, order="C")


def defined_bytes(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Returns an array whose bytes have only defined bits: integers of less than 8 bits are sign-extended."""
    if array.dtype.kind != "V" or not is_integer(array.dtype):
        return array
    import numpy as np

    return array.astype(np.int8 if array.dtype.name.startswith("i") else np.uint8)
