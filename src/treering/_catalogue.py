"""What a checkpoint holds, leaf by leaf: the words that readers, writers and templates share.

An array leaf is described by its dtype (as text, so that listing needs no NumPy) and global shape; any
other leaf is a value that travels inside the manifest. Values are tagged, because JSON alone would
lose the difference between 1 and 1.0, the infinities, NaN payloads and integers beyond 2^53.
"""

import base64
import math
import operator
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeGuard

import msgspec

from ._paths import matches, may_match_below
from .errors import CorruptError, MismatchError, UnsupportedError

ArrayType = Literal["jax", "jax-weak", "numpy", "numpy-scalar", "key"]
ValueType = Literal["bool", "int", "float", "complex", "str", "bytes", "none", "function", "iterator"]
NO_ARRAY = ("none", "function")
EXACT = 1 << 53  # up to here every integer is a double, as which many readers of JSON take numbers


class ArrayEntry(msgspec.Struct, array_like=True, tag_field="leaf", tag="array", frozen=True, gc=False):
    """An array leaf.

    `shape` is the global shape of the stored array. For ``type="key"`` that is the uint32 key data, whose
    last axis belongs to the key implementation named by `impl`.
    """

    path: str
    type: ArrayType
    dtype: str
    shape: tuple[int, ...]
    impl: str = ""

    @property
    def nbytes(self) -> int:
        """Of the array as it is stored, without what the file around it takes."""
        from ._dtypes import itemsize

        return math.prod(self.shape) * itemsize(self.dtype)

    def at(self, path: str) -> "ArrayEntry":
        """The same array under another path."""
        return ArrayEntry(path, self.type, self.dtype, self.shape, self.impl)


class LostEntry(ArrayEntry, tag="lost", frozen=True, gc=False):
    """A leaf, or everything below a path, that should be there and cannot be read.

    It looks like an array, so that whatever reads it fails with a `CorruptError` that says why. `tree` says that it
    may stand for any leaves at and below its path.
    """

    why: tuple[str, ...] = ()
    tree: bool = False

    def at(self, path: str) -> "LostEntry":
        """The same loss under another path."""
        return lost(path, *self.why, tree=self.tree)


class ValueEntry(
    msgspec.Struct, array_like=True, tag_field="leaf", tag="value", frozen=True, gc=False, forbid_unknown_fields=True
):
    """A leaf that is no array. `value` is in the tagged form of `encode`."""

    path: str
    type: ValueType
    value: Any = None

    def at(self, path: str) -> "ValueEntry":
        """The same value under another path."""
        return ValueEntry(path, self.type, self.value)

    def decode(self) -> Any:
        """The Python value; None for functions, which have no value here, and the states of iterators."""
        if self.type == "iterator":
            from ._iterators import decoded

            return decoded(self.value)
        return decode(self.type, self.value)


Entry = ArrayEntry | ValueEntry


def step_number(step: Any) -> int:
    """A step as an int. Raises `MismatchError` for what is none, or is beyond what every reader of JSON can tell."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= EXACT:
        raise MismatchError(f"step={step!r:.100}: expected an integer from 0 to 2^53")
    return number


def is_shape(shape: Sequence[int], itemsize: int) -> bool:
    """Whether an array can have a shape, in NumPy, where bytes are counted in 63 bits, as in any other library."""
    size = itemsize
    for length in shape:
        size *= length or 1
    return len(shape) <= 64 and min(shape, default=0) >= 0 and size < 1 << 63


def lost(path: str, *why: str, tree: bool = False) -> LostEntry:
    """The entry of what should lie at a path, or with `tree` at or below it, and cannot be read."""
    return LostEntry(path, "numpy", "uint8", (), "", why, tree)


def is_lost_tree(entry: Entry | None) -> TypeGuard[LostEntry]:
    """Whether an entry stands for leaves whose names are not known."""
    return isinstance(entry, LostEntry) and entry.tree


def fits(path: str, entry: Entry, globs: str | Iterable[str]) -> bool:
    """Whether a leaf's path fits one of the globs; where a tree is lost, whether that of a leaf of it could."""
    if not is_lost_tree(entry):
        return matches(path, globs)
    return any(may_match_below(path, glob) for glob in ((globs,) if isinstance(globs, str) else globs))


def covered(path: str, entry: Entry | None, globs: str | Iterable[str]) -> bool:
    """Whether a leaf's path fits one of the globs; where a tree is lost, whether one fits all of it or is its path."""
    if not is_lost_tree(entry):
        return matches(path, globs)
    candidates = (globs,) if isinstance(globs, str) else globs
    return any(glob == path or (glob.rpartition("/")[2] == "**" and matches(path, glob)) for glob in candidates)


def check_whole(entries: Iterable[Entry]) -> None:
    """Raises `CorruptError` that names what cannot be read of these entries."""
    if reasons := tuple(dict.fromkeys(why for entry in entries if isinstance(entry, LostEntry) for why in entry.why)):
        listed = "\n".join(reasons[:5])
        raise CorruptError(f"{listed}\nand {len(reasons) - 5} more like these" if len(reasons) > 5 else listed)


def from_base64(text: str) -> bytes:
    """The bytes that a text stands for. Raises `ValueError` unless it is how they are written."""
    found = base64.b64decode(text, validate=True)
    if base64.b64encode(found).decode() != text:
        raise ValueError("bits that base64 does not use are not 0")
    return found


def encode_float(x: float) -> float | str:
    """A finite float as itself, any other as text; a NaN with its own bits is ``nan:<16 hex digits>``."""
    if math.isfinite(x):
        return x
    bits = struct.pack(">d", x)
    if x != x and bits != struct.pack(">d", math.nan):
        return "nan:" + bits.hex()
    return str(x)


def decode_float(x: Any) -> float:
    """The inverse of `encode_float`."""
    if isinstance(x, str):
        if x.startswith("nan:"):
            found = struct.unpack(">d", bytes.fromhex(x[4:]))[0]
            if encode_float(found) != x:
                raise ValueError(f"{x!r} is not written as a NaN of its own")
            return found
        if x not in ("nan", "inf", "-inf"):
            raise ValueError(f"{x!r} is not a number")
    elif type(x) not in (int, float):
        raise ValueError(f"{x!r} is not a number")
    return float(x)


def encode(value: Any) -> tuple[ValueType, Any]:
    """A Python value as (type, JSON). Exact types only: a subclass would not come back as itself.

    Raises `UnsupportedError` for anything else.
    """
    kind = type(value)
    if value is None:
        return "none", None
    if kind is bool:
        return "bool", value
    if kind is int:
        return "int", value if abs(value) <= EXACT else hex(value)
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
    """The inverse of `encode`. Raises `CorruptError` when the value does not have its type."""
    try:
        if kind == "bool" and isinstance(value, bool):
            return value
        if kind == "int" and type(value) is int and abs(value) <= EXACT:
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
