"""Writes Python values as JSON, and reads them.

Values are tagged with their type. JSON alone would lose the difference between 1 and 1.0, the infinities, the bits of
NaNs, and integers beyond 2^53.

In JSON of any shape, floats that JSON cannot express are text, with a list of the places of these texts, as JSON
Pointers (RFC 6901). Because of the list, no text of the user is mistaken for a float. A reader that does not know the
list finds text.
"""

import base64
import math
import re
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from ..errors import CorruptError, UnsupportedError
from .leaf_paths import key_text, split

ValueType = Literal["bool", "int", "float", "complex", "str", "bytes", "none", "function", "iterator"]
MAX_EXACT_INT = 1 << 53  # Many readers of JSON take numbers as doubles, which hold every integer up to here.
_POINTER = re.compile("(?:/(?:[^~/]|~[01])*)*", re.DOTALL)
_INDEX = re.compile("0|[1-9][0-9]*")


def is_shape(shape: Sequence[int], itemsize: int) -> bool:
    """Returns True if an array can have this shape in NumPy. Like other libraries, NumPy holds sizes in 63 bits."""
    size = itemsize
    for length in shape:
        size *= length or 1
    return len(shape) <= 64 and min(shape, default=0) >= 0 and size < 1 << 63


def from_base64(text: str) -> bytes:
    """Returns the bytes of a base64 text. Raises `ValueError` if encoding them gives another text."""
    found = base64.b64decode(text, validate=True)
    if base64.b64encode(found).decode() != text:
        raise ValueError("bits that base64 does not use are not 0")
    return found


def encode_float(x: float) -> float | str:
    """Returns a finite float as it is, and any other as text. A NaN with unusual bits is ``nan:<16 hex digits>``."""
    if math.isfinite(x):
        return x
    bits = struct.pack(">d", x)
    if x != x and bits != struct.pack(">d", math.nan):
        return "nan:" + bits.hex()
    return str(x)


def decode_float(x: Any) -> float:
    """Undoes `encode_float`. Raises `ValueError` for any other text."""
    if isinstance(x, str):
        if x.startswith("nan:"):
            found = struct.unpack(">d", bytes.fromhex(x[4:]))[0]
            if encode_float(found) != x:
                raise ValueError(f"{x!r} is not written as a NaN of its own")
            return found
        if x not in ("nan", "inf", "-inf"):
            raise ValueError(f"{x!r} is not a number")
    elif type(x) not in (int, float):  # JSON writers may write 1.0 as 1
        raise ValueError(f"{x!r} is not a number")
    return float(x)


def encode(value: Any) -> tuple[ValueType, Any]:
    """Returns the type and the JSON of a Python value.

    Raises `UnsupportedError` for any other type. A subclass is refused too, because it would not be restored as itself.
    """
    kind = type(value)
    if value is None:
        return "none", None
    if kind is bool:
        return "bool", value
    if kind is int:
        return "int", value if abs(value) <= MAX_EXACT_INT else hex(value)
    if kind is float:
        return "float", encode_float(value)
    if kind is complex:
        return "complex", [encode_float(value.real), encode_float(value.imag)]
    if kind is bytes:
        return "bytes", base64.b64encode(value).decode()
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UnsupportedError("a str that is not valid Unicode (a lone surrogate)") from None
        return "str", value
    raise UnsupportedError(f"a {kind.__module__}.{kind.__qualname__}")


def decode(kind: str, value: Any) -> Any:
    """Undoes `encode`. Raises `CorruptError` if the value does not have its type."""
    try:
        if kind == "bool" and isinstance(value, bool):
            return value
        if kind == "int" and type(value) is int and abs(value) <= MAX_EXACT_INT:
            return value
        if kind == "int" and isinstance(value, str) and encode(found := int(value, 16)) == ("int", value):
            return found
        if kind == "float":
            return decode_float(value)
        if kind == "complex" and isinstance(value, list):
            real, imag = value
            return complex(decode_float(real), decode_float(imag))
        if kind == "str" and isinstance(value, str):
            return value
        if kind == "bytes" and isinstance(value, str):
            return from_base64(value)
        if (kind == "none" and value is None) or (kind == "function" and isinstance(value, str)):
            return None
    except (ValueError, TypeError, OverflowError, UnsupportedError, struct.error):
        pass
    raise CorruptError(f"expected a value of type {kind}, found {value!r:.100}")


def floats_to_text(value: Any, place: str, places: list[str]) -> Any:
    """Returns the value with text for every NaN and infinity in it. Appends their places to `places`."""
    if isinstance(value, dict):
        return {name: floats_to_text(part, f"{place}/{key_text(name)}", places) for name, part in value.items()}
    if isinstance(value, list):
        return [floats_to_text(part, f"{place}/{n}", places) for n, part in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        places.append(place)
        return encode_float(value)
    return value


def text_to_floats(value: Any, places: Iterable[str]) -> Any:
    """Undoes `floats_to_text`, in the value itself, and returns it.

    Raises `ValueError` if a place has no text of a float.
    """
    top: Any = {"": value}
    for place in places:
        part, key, text = top, "", None
        *outer, last = split(place)
        try:
            for name in outer:
                part = part[_key(part, name)]
            key = _key(part, last)
            text = part[key]
        except (LookupError, TypeError):
            pass
        if not isinstance(text, str) or not _POINTER.fullmatch(place):
            raise ValueError(f"expected the text of a float at {place!r:.100}, found {text!r:.100}")
        part[key] = decode_float(text)
    return top[""]


def _key(part: Any, name: str) -> Any:
    return int(name) if isinstance(part, list) and _INDEX.fullmatch(name) else name
