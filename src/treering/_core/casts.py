"""Casts arrays, and refuses a cast that loses values: finite numbers that become infinities or NaNs, or wrap around."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ..errors import MismatchError
from . import dtypes
from .boxes import full_box, slice_boxes, slices

if TYPE_CHECKING:
    import numpy as np

_BLOCK_BYTES = 1 << 20  # of an array that is searched for lost values at a time
_COMPONENTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16", "bcomplex32": "bfloat16"}
_WIDE = ("bfloat16", "float32", "float64")


class _DtypeRange(NamedTuple):
    """The least and the greatest number of a dtype: of integers exactly, of floats without infinities."""

    low: float
    high: float


def cast(
    array: "np.ndarray[Any, Any]", dtype: "np.dtype[Any]", path: str, *, can_clip: bool = True
) -> "np.ndarray[Any, Any]":
    """Returns the array in another dtype, C-ordered. Numbers are rounded, and the smallest ones become zero.

    can_clip: False if no rule can change the values before this cast, so that the error proposes none.

    Raises `MismatchError`, which names the leaf, if the dtype lacks a value: a number beyond its range, or an infinity
    or NaN if it has none, or an imaginary part other than 0.
    """
    array = _real(array, dtype, path)
    made = dtypes.convert(array, dtype)
    if not is_in_range(array, dtype):
        _check(array, made, path, can_clip)
    return made


def is_in_range(array: "np.ndarray[Any, Any]", dtype: "np.dtype[Any]") -> bool:
    """Returns True if all numbers of an array are in the range of a dtype. Infinities and NaN are in no narrower one.

    Finding the least and the greatest number takes far less time than a cast, and no memory.
    """
    import numpy as np

    bounds = _bounds(array.dtype, dtype)
    if bounds is None or not array.size:
        return True
    if _drops_imaginary(array.dtype, dtype):
        return False  # `cast` looks at the imaginary parts.
    numbers = _numbers(array, dtype)
    kind = int if dtypes.is_integer(numbers.dtype) else float  # Python compares integers and floats exactly.
    with np.errstate(invalid="ignore"):
        least, greatest = kind(numbers.min()), kind(numbers.max())  # NaN if any number is
    return bounds.low <= least and greatest <= bounds.high


def refuse(lost: Sequence[MismatchError]) -> NoReturn:
    """Raises one error for all casts that lose values."""
    if len(lost) == 1:
        raise lost[0]
    raise MismatchError("\n".join([f"{len(lost)} leaves do not fit a cast:", *(f"  {error}" for error in lost)]))


@functools.lru_cache(maxsize=512)
def _bounds(old: "np.dtype[Any]", new: "np.dtype[Any]") -> _DtypeRange | None:
    """Returns the range of `new` if it lacks a value of `old`; None if it has all, or if one of them is no number."""
    own, bounds = _range(old), _range(new)
    if own is None or bounds is None or new.kind == "b" or dtypes.widens(old, new):
        return None
    is_exact = old.kind == "b" or dtypes.is_integer(old)
    return None if is_exact and bounds.low <= own.low and own.high <= bounds.high else bounds


@functools.lru_cache(maxsize=512)
def _range(dtype: "np.dtype[Any]") -> _DtypeRange | None:
    import ml_dtypes

    if dtype.kind == "b":
        return _DtypeRange(0, 1)
    if dtypes.is_integer(dtype):
        integers = ml_dtypes.iinfo(dtype)
        return _DtypeRange(int(integers.min), int(integers.max))
    if component := _COMPONENTS.get(dtype.name):
        return _range(dtypes.to_numpy(component))
    if not dtypes.is_float(dtype):
        return None
    floats = ml_dtypes.finfo(dtype)
    return _DtypeRange(float(floats.min), float(floats.max))


def _numbers(array: "np.ndarray[Any, Any]", new: "np.dtype[Any]") -> "np.ndarray[Any, Any]":
    """Returns the real numbers of an array that a cast converts, without imaginary parts if `new` has none."""
    if array.dtype.name not in _COMPONENTS:
        return array
    import numpy as np

    pairs = array if array.dtype.kind == "c" else array.astype(np.complex64)
    return np.stack([pairs.real, pairs.imag], -1) if new.name in _COMPONENTS else pairs.real


def _drops_imaginary(old: "np.dtype[Any]", new: "np.dtype[Any]") -> bool:
    return old.name in _COMPONENTS and new.name not in _COMPONENTS and new.kind != "b"


def _real(array: "np.ndarray[Any, Any]", new: "np.dtype[Any]", path: str) -> "np.ndarray[Any, Any]":
    """Returns the array, without imaginary parts if `new` has none. Raises `MismatchError` if one of them is not 0."""
    if not _drops_imaginary(array.dtype, new):
        return array
    import numpy as np

    pairs = array if array.dtype.kind == "c" else array.astype(np.complex64)
    if count := int(np.count_nonzero(pairs.imag)):
        old = array.dtype.name
        advice = f", or drop it by a rule before the cast: tr.rules.map({path!r}, lambda x: x.real + 0j)"
        raise MismatchError(
            f"{path or '(root)'}: expected real numbers for {new.name}, found {count:,} of {array.size:,} {old} values "
            f"with an imaginary part; use {old}{advice if array.dtype.kind == 'c' else ''}"
        )
    return pairs.real


def _check(array: "np.ndarray[Any, Any]", made: "np.ndarray[Any, Any]", path: str, can_clip: bool) -> None:
    """Raises `MismatchError` if values were lost. It looks at a block at a time, because this takes memory."""
    import numpy as np

    bounds = _range(made.dtype)
    assert bounds is not None
    count, has_nan, has_infinity, worst = 0, False, False, None
    for numbers in _blocks(array, made):
        lost = _lost(*numbers, made.dtype, bounds)
        if found := int(np.count_nonzero(lost)):
            count += found
            values = numbers[0][lost]
            has_nan, has_infinity = (
                has_nan or bool(np.isnan(values).any()),
                has_infinity or bool(np.isinf(values).any()),
            )
            if (finite := values[np.isfinite(values)]).size:
                kind = int if dtypes.is_integer(values.dtype) else float
                worst = max(worst or 0, kind(finite.min()), kind(finite.max()), key=abs)
    if not count:
        return
    old, new = array.dtype.name, made.dtype.name
    low, high = map(_text, bounds)
    shown = ("an infinity" if has_infinity else "NaN") if worst is None else _text(worst)
    advice = f"use {_wider(array.dtype, made.dtype, worst or 0)}"
    if can_clip and not {old, new} & _COMPONENTS.keys():
        advice += f", or clip them with rules before the cast: [{_clipping(array.dtype, bounds, has_nan, path)}]"
    raise MismatchError(
        f"{path or '(root)'}: expected values that fit {new} ({low} to {high}), found {count:,} of "
        f"{array.size:,} {old} values that do not, such as {shown}; {advice}"
    )


def _text(number: float) -> str:
    return f"{number:.6g}" if isinstance(number, float) else str(number)


def _blocks(
    array: "np.ndarray[Any, Any]", made: "np.ndarray[Any, Any]"
) -> "Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]":
    """Yields the numbers of each block before and after a cast. Integers of less than 8 bits are wider than stored."""
    for box in slice_boxes(array.shape, array.itemsize, _BLOCK_BYTES):
        at = (*slices(box, full_box(array.shape)), ...)
        yield dtypes.defined_bytes(_numbers(array[at], made.dtype)), _numbers(made[at], array.dtype)


def _lost(
    before: "np.ndarray[Any, Any]", after: "np.ndarray[Any, Any]", dtype: "np.dtype[Any]", bounds: _DtypeRange
) -> "np.ndarray[Any, Any]":
    """Returns which numbers a cast has lost, as booleans."""
    import numpy as np

    if dtypes.is_integer(dtype):
        if dtypes.is_integer(before.dtype):
            return (before < bounds.low) | (before > bounds.high)
        cut = np.trunc(before.astype(np.float64))
        return ~((cut >= bounds.low) & (cut < bounds.high + 1))  # The greatest integer may be no float.
    wide = before.astype(np.float64)
    if dtype.name.startswith(("float4", "float6")):  # They have no NaN: what does not fit becomes the greatest number.
        last_step = bounds.high - float(np.nextafter(dtype.type(bounds.high), dtype.type(0)))
        return ~(np.abs(wide) < bounds.high + last_step / 2)
    return (np.isnan(after) & ~np.isnan(wide)) | (np.isinf(after) & np.isfinite(wide))


def _wider(old: "np.dtype[Any]", new: "np.dtype[Any]", worst: float) -> str:
    """Returns the name of a dtype that holds a number: a float if one was wanted, and otherwise the old one."""
    if dtypes.is_float(new):
        for name in _WIDE:
            own = _range(dtypes.to_numpy(name))
            if own and abs(worst) <= own.high:
                return name
    return old.name


def _clipping(old: "np.dtype[Any]", bounds: _DtypeRange, has_nan: bool, path: str) -> str:
    """Returns the rules that clip the values of a leaf."""
    rules, source = "", old
    if old.kind not in "iuf":  # NumPy clips only its own numbers.
        source = dtypes.to_numpy("int32" if dtypes.is_integer(old) else "float32")
        rules = f"tr.rules.cast({path!r}, {source.name!r}), "
    low, high = _clip_bounds(source, bounds)
    numbers = "np.where(x == x, x, 0)" if has_nan else "x"
    return rules + f"tr.rules.map({path!r}, lambda x: {numbers}.clip({low!r}, {high!r}))"


def _clip_bounds(source: "np.dtype[Any]", bounds: _DtypeRange) -> tuple[float, float]:
    """Returns the least and the greatest number of a dtype of NumPy that are within bounds."""
    import numpy as np

    if dtypes.is_integer(source):
        own = np.iinfo(source)
        return max(math.ceil(bounds.low), int(own.min)), min(math.floor(bounds.high), int(own.max))
    with np.errstate(all="ignore"):
        low, high = (np.array(float(bound)).astype(source)[()] for bound in bounds)
        low = np.nextafter(low, source.type(math.inf)) if float(low) < bounds.low else low
        high = np.nextafter(high, source.type(0)) if float(high) > bounds.high else high
    return float(low), float(high)
