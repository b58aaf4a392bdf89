"""Decides what one leaf of a template becomes from the checkpoint's entry in its place, or why it cannot."""

import functools
from typing import Any, Literal, NoReturn

import jax
import ml_dtypes
import msgspec
import numpy as np

from .._core import dtypes, habits
from .._core.describe import FUNCTION, NONE, NOTHING, describe, reshaping, shorten
from .._core.entries import ArrayEntry, Entry, ValueEntry
from .._processes import coordinator
from .._pytree import iterators

_SCALARS = frozenset((bool, int, float, complex, str, bytes))
_ON_HOST = (np.ndarray, np.generic)  # made once: a union of classes takes longer to make than to ask


class Target(msgspec.Struct, frozen=True, gc=False):
    """The result for a leaf.

    `make` is its kind: an array of `dtype` on the host or in JAX, a scalar, a key; a number of the Python type `value`;
    or `value` is the leaf itself.
    """

    make: Literal["numpy", "numpy-scalar", "jax", "key", "number", "value"]
    entry: ArrayEntry | None = None
    dtype: Any = None
    weak: bool = False
    value: Any = None
    state: tuple[Any] | None = None  # for the value, which is an iterator
    filled: bool = False  # whether the value is the template's, because the checkpoint has none


class Differs(Exception):
    """expected, found, what would allow it"""


def target_of(path: str, leaf: Any, entry: Entry, asked: Any, numbers_are_arrays: bool) -> Target:
    """The target of a leaf and an entry; `asked` is the argument `dtype`. Raises `Differs`."""
    if type(leaf) in _SCALARS:
        if isinstance(entry, ValueEntry) and entry.type == type(leaf).__name__:
            return Target("value", value=entry.decode())
        may = type(leaf) is int or numbers_are_arrays
        if may and isinstance(entry, ArrayEntry) and _is_number(entry, type(leaf)):
            return Target("number", entry, dtypes.to_numpy(entry.dtype), value=type(leaf))
        _differ(type(leaf).__name__, entry, "a template leaf of that type would take it")
    on_host = isinstance(leaf, _ON_HOST)
    if not (on_host or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))):
        if iterators.is_iterator(type(leaf)):
            return _iterator_target(path, leaf, entry)
        hint = habits.of_leaf(type(leaf)) or iterators.why_not(type(leaf)) or "no leaf of this type can be restored"
        _differ(f"{type(leaf).__module__}.{type(leaf).__qualname__}", entry, hint)
    if not (on_host or isinstance(leaf.dtype, np.dtype)) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _key_target(path, leaf, entry)
    want = np.dtype(leaf.dtype)
    shape = tuple(leaf.shape)
    if isinstance(entry, ValueEntry):
        dtype, value = _number(leaf, entry, want, asked), entry.decode()
    else:
        if entry.type == "key" or shape != entry.shape:
            has_value = not isinstance(leaf, jax.ShapeDtypeStruct)
            hint = reshaping(path, entry.shape, shape, has_value=has_value)
            _differ(_shape_text(leaf), entry, "a typed key is no plain array" if entry.type == "key" else hint)
        if isinstance(leaf, np.character):
            found = dtypes.to_numpy(entry.dtype)
            want = found if found.kind == want.kind else want  # of any length
        dtype, value = _dtype_for(want, entry.dtype, asked), None
        if isinstance(dtype, str):
            _differ(_shape_text(leaf), entry, dtype.format(path=path))
    if not on_host:
        check_width(dtype, entry, "" if dtype == want else ", to which dtype= casts it")
    weak = not on_host and bool(getattr(leaf, "weak_type", False)) and dtype == want
    make = "numpy-scalar" if isinstance(leaf, np.generic) else "numpy" if on_host else "jax"
    return Target(make, entry if isinstance(entry, ArrayEntry) else None, dtype, weak, value)


def _number(leaf: Any, entry: ValueEntry, want: np.dtype[Any], asked: Any) -> np.dtype[Any]:
    """The dtype of the 0-d array that a Python number becomes. Raises `Differs` where it would lose digits unasked."""
    expected, value = _shape_text(leaf), entry.decode()
    of_kind = {"bool": want.kind == "b", "int": dtypes.is_integer(want), "complex": want.kind == "c"}
    if tuple(leaf.shape) or not of_kind.get(entry.type, entry.type == "float" and dtypes.is_float(want)):
        _differ(expected, entry, f"a template leaf of type {entry.type} would take it")
    if entry.type == "int" and (np.array(value).dtype.hasobject or not fits(np.array(value), want)):
        _differ(expected, f"int {shorten(value)}", "it does not fit; use a wider integer in the template")
    if entry.type == "float" and asked not in (None, "template"):
        return np.dtype(asked)
    if entry.type in ("float", "complex") and not (entry.type == "float" and asked == "template"):
        narrowed = type(value)(dtypes.cast(np.array(value), want))
        if narrowed != value and value == value:
            allowed = "dtype='template' allows that" if entry.type == "float" else f"use {np.dtype(complex)}"
            _differ(expected, f"{entry.type} {shorten(value)}", f"it would become {narrowed!r}; {allowed}")
    return want


@functools.lru_cache(maxsize=512)
def _dtype_for(want: np.dtype[Any], found: str, asked: Any) -> np.dtype[Any] | str:
    """The dtype of an array stored as `found` where the template has `want`, or a text that says why it has none."""
    have = dtypes.to_numpy(found)
    if dtypes.is_float(have) and asked not in (None, "template"):
        return np.dtype(asked)
    if have == want.newbyteorder("<") or dtypes.widens(have, want):
        return want
    if dtypes.is_integer(have) and dtypes.is_integer(want):
        return want  # tested value by value when it is read
    if dtypes.is_float(have) and dtypes.is_float(want):
        return want if asked == "template" else "dtype='template' narrows floats to the template's"
    rule = f"tr.rules.cast({{path!r}}, {want.name!r})"
    return f"one kind of number does not become another; use {found} in the template, or {rule}"


def _key_target(path: str, leaf: Any, entry: Entry) -> Target:
    impl = _key_impl(leaf.dtype)
    expected = f"key<{impl}>[{','.join(map(str, leaf.shape))}]"
    if not isinstance(entry, ArrayEntry) or entry.type != "key":
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        is_data = isinstance(entry, ArrayEntry) and (entry.dtype, entry.shape) == ("uint32", data.shape)
        rule = f"; tr.rules.wrap_key_data({path!r}, {impl!r}) makes them of their data" if is_data else ""
        _differ(expected, entry, f"only typed keys become typed keys{rule}")
    if entry.impl != impl or entry.shape[:-1] != tuple(leaf.shape):
        _differ(expected, entry, "shapes and key implementations must be equal")
    return Target("key", entry, dtypes.to_numpy(entry.dtype))


@functools.lru_cache(maxsize=64)
def _key_impl(dtype: Any) -> str:
    """The name of a key dtype's implementation, which JAX gives for keys alone and not for their dtype."""
    names: list[str] = []
    jax.eval_shape(lambda key: names.append(str(jax.random.key_impl(key))), jax.ShapeDtypeStruct((), dtype))
    return names[0]


def _iterator_target(path: str, leaf: Any, entry: Entry) -> Target:
    index, count = coordinator.position()
    if not isinstance(entry, ValueEntry) or entry.type != "iterator":
        _differ(f"the state of a {type(leaf).__name__}", entry, "only iterators take it, and nothing else does")
    state, saved = iterators.of_process(entry, index, count)
    if saved != count:
        _differ(
            f"the states of {count} iterators, one per process",
            f"those of {saved}",
            f"restore with that many processes, or put `...` in its place and set it yourself, to one of the states in "
            f"tr.open(…)[{path!r}] (Grain's ElasticIterator has one state for any number of processes)",
        )
    return Target("value", value=leaf, state=(state,))


def missing_target(path: str, leaf: Any, entry: Entry | None, *, allowed: bool) -> Target:
    """The template's own leaf where the checkpoint has none, or None or a function. Raises `Differs`."""
    found = NOTHING if entry is None else NONE if entry.type == "none" else FUNCTION
    expected = type(leaf).__name__ if type(leaf) in _SCALARS else _shape_text(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        hint = f"where the template has an array and not only a shape, as init() has, missing=[{path!r}] takes that"
        raise Differs(expected, found, hint)
    if (hint := habits.of_leaf(type(leaf))) or not allowed:
        raise Differs(expected, found, hint or f"missing='template' or missing=[{path!r}] takes the template's")
    return Target("value", value=leaf, filled=True)


def _is_number(entry: ArrayEntry, kind: type) -> bool:
    """Whether an array is one that a Python number becomes, and gives it back without loss."""
    if entry.shape:
        return False
    dtype = dtypes.to_numpy(entry.dtype)
    if kind is int:
        return dtypes.is_integer(dtype)
    return (kind is bool and dtype.kind == "b") or (kind in (float, complex) and dtypes.widens(dtype, np.dtype(kind)))


def fits(values: np.ndarray, dtype: np.dtype[Any]) -> bool:
    """Whether integers survive a change of width."""
    if not values.size:
        return True
    wide = values.astype(np.int64) if values.dtype.kind == "V" else values
    limits = ml_dtypes.iinfo(dtype)
    return limits.min <= int(wide.min()) and int(wide.max()) <= limits.max


def check_width(dtype: np.dtype[Any], found: Entry, why: str = "") -> None:
    """Raises `Differs` when JAX, as it is set up, does not have a dtype."""
    allowed = _canonical(dtype, jax.config.read("jax_enable_x64"))
    if allowed == dtype:
        return
    if allowed is None:
        raise Differs("a dtype that JAX has", describe(found), "restore it into a NumPy array")
    if isinstance(found, ArrayEntry) and found.dtype == dtype.name:
        hint = "switch it on, or restore into NumPy"
        raise Differs(f"{allowed.name}, for jax_enable_x64 is off", describe(found), hint)
    raise Differs(
        f"{dtype.name}{why or ' (the template has it)'}, which JAX has not while jax_enable_x64 is off",
        describe(found),
        f"use {allowed.name}, or switch it on",
    )


def is_of_jax(dtype: np.dtype[Any]) -> bool:
    """Whether JAX, as it is set up, has a dtype."""
    return _canonical(dtype, jax.config.read("jax_enable_x64")) == dtype


@functools.lru_cache(maxsize=512)
def _canonical(dtype: np.dtype[Any], x64: bool) -> np.dtype[Any] | None:  # x64 is only a key of the cache
    return None if dtype.kind in "MmSU" else np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _shape_text(leaf: Any) -> str:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return type(leaf).__name__ if shape is None else f"{dtype}[{','.join(map(str, shape))}]"


def _differ(expected: str, found: Entry | str, hint: str) -> NoReturn:
    raise Differs(expected, found if isinstance(found, str) else describe(found), hint)
