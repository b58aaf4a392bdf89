"""Decides what a leaf of a template becomes from the checkpoint's entry at its path, or why it cannot be restored."""

import cmath
import functools
from typing import Any, Literal, NoReturn

import jax
import msgspec
import numpy as np

from .._core import casts, dtypes, migration_hints
from .._core.describe import FUNCTION, NONE, NOTHING, describe_entry, reshape_hint, shorten
from .._core.entries import ArrayEntry, Entry, IteratorEntry, IteratorInfo, ValueEntry, visible_shape
from .._processes import coordinator
from .._pytree import iterators, state_methods
from ..errors import MismatchError, UnsupportedError

_SCALARS = frozenset((bool, int, float, complex, str, bytes))
_A_NUMBER = {"bool": "a bool", "int": "an int", "float": "a float", "complex": "a complex"}
_HOST_TYPES = (np.ndarray, np.generic)  # made once, because making a union of classes is slower than `isinstance`


class LeafTarget(msgspec.Struct, frozen=True, gc=False):
    """What a leaf becomes.

    make: the kind: an array of `dtype` on the host or in JAX, a scalar, or a key. With "number" it is a number of the
        Python type `value`, with "value" it is `value` itself.
    entry: the array of the checkpoint that it is made of, if any.
    state: the state of the iterator that `value` is then, and what the checkpoint records about it.
    filled: True if `value` is the template's, because the checkpoint has none.
    """

    make: Literal["numpy", "numpy-scalar", "jax", "key", "number", "value"]
    entry: ArrayEntry | None = None
    dtype: Any = None
    weak: bool = False
    value: Any = None
    state: tuple[Any, IteratorInfo] | None = None
    filled: bool = False


class LeafMismatch(Exception):
    """A leaf cannot be restored. The arguments say what was expected, what was found, and what would allow it."""


def target_of(path: str, leaf: Any, entry: Entry, asked: Any, records_kinds: bool) -> LeafTarget:
    """Returns the target of a leaf and an entry.

    asked: the argument `dtype` of the restore.
    records_kinds: True if the checkpoint records weak types, which then win over those of the template.

    Raises `LeafMismatch` if there is none.
    """
    if type(leaf) in _SCALARS:
        if isinstance(entry, ValueEntry) and entry.type == type(leaf).__name__:
            return LeafTarget("value", value=entry.decode())
        if isinstance(entry, ArrayEntry) and _is_number(entry, type(leaf)):
            return LeafTarget("number", entry, dtypes.to_numpy(entry.dtype), value=type(leaf))
        _leaf_mismatch(type(leaf).__name__, entry, "a template leaf of that type would take it")
    on_host = isinstance(leaf, _HOST_TYPES)
    if not (on_host or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))):
        if state_methods.is_iterator(type(leaf)):
            return _iterator_target(path, leaf, entry)
        hint = (
            migration_hints.leaf_hint(type(leaf))
            or state_methods.unsupported_hint(type(leaf))
            or "no leaf of this type can be restored"
        )
        _leaf_mismatch(f"{type(leaf).__module__}.{type(leaf).__qualname__}", entry, hint)
    if not on_host and (hint := state_methods.mutable_hint(type(leaf))):
        _leaf_mismatch(f"{type(leaf).__module__}.{type(leaf).__qualname__}", entry, hint)
    if not (on_host or isinstance(leaf.dtype, np.dtype)) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _key_target(path, leaf, entry)
    try:
        want = np.dtype(leaf.dtype)
    except TypeError:
        _leaf_mismatch(leaf_text(leaf), entry, f"no array of that dtype is saved; {dtypes.EXTENDED_HINT}")
    shape = tuple(leaf.shape)
    if isinstance(entry, ValueEntry):
        dtype, value = _number(path, leaf, entry, want, asked), entry.decode()
    else:
        if entry.type == "key" or shape != entry.shape:
            has_value = not isinstance(leaf, jax.ShapeDtypeStruct)
            hint = reshape_hint(path, entry.shape, shape, has_value=has_value)
            _leaf_mismatch(leaf_text(leaf), entry, "a typed key is no plain array" if entry.type == "key" else hint)
        if isinstance(leaf, np.character):
            found = dtypes.to_numpy(entry.dtype)
            want = found if found.kind == want.kind else want  # Texts may have any length.
        dtype, value = _dtype_for(want, entry.dtype, asked), None
        if isinstance(dtype, str):
            _leaf_mismatch(leaf_text(leaf), entry, dtype.format(path=path))
    if not on_host:
        check_width(dtype, entry, "" if dtype == want else ", to which dtype= casts it", leaf)
    weak = not on_host and dtype == want and _is_weak(leaf)
    if records_kinds and not on_host and isinstance(entry, ArrayEntry) and dtypes.to_numpy(entry.dtype) == dtype:
        weak = entry.type == "jax-weak" or (weak and entry.type != "jax")
    make = "numpy-scalar" if isinstance(leaf, np.generic) else "numpy" if on_host else "jax"
    return LeafTarget(make, entry if isinstance(entry, ArrayEntry) else None, dtype, weak, value)


def _number(path: str, leaf: Any, entry: ValueEntry, want: np.dtype[Any], asked: Any) -> np.dtype[Any]:
    """Returns the dtype of the 0-d array that a Python number becomes.

    A weak type in the template means that JAX made it of a Python number, so digits that JAX would drop may be lost.

    Raises `LeafMismatch` for another kind of number, and if it would lose digits otherwise, unless `dtype=` allows it.
    """
    expected, value = leaf_text(leaf), entry.decode()
    of_kind = {"bool": want.kind == "b", "int": dtypes.is_integer(want), "complex": want.kind == "c"}
    if tuple(leaf.shape) or not of_kind.get(entry.type, entry.type == "float" and dtypes.is_float(want)):
        _leaf_mismatch(expected, entry, f"a template leaf of type {entry.type} would take it")
    made = np.dtype(asked) if entry.type == "float" and asked not in (None, "template") else want
    try:
        casts.cast(np.array(value), made, path)
    except (MismatchError, TypeError, OverflowError):  # NumPy has no dtype for an integer of more than 64 bits.
        found, hint = f"{entry.type} {shorten(value)}", f"use {_A_NUMBER[entry.type]} in the template"
        _leaf_mismatch(expected, found, f"it does not fit {made.name}; {hint}")
    if made is not want:
        return made
    if entry.type in ("float", "complex") and not (entry.type == "float" and asked == "template"):
        narrowed = type(value)(dtypes.convert(np.array(value), want))
        rounded = _is_weak(leaf) and cmath.isfinite(narrowed) and narrowed != 0
        if narrowed != value and value == value and not rounded:
            allowed = "dtype='template' allows that" if entry.type == "float" else f"use {np.dtype(complex)}"
            _leaf_mismatch(expected, f"{entry.type} {shorten(value)}", f"it would become {narrowed!r}; {allowed}")
    return want


@functools.lru_cache(maxsize=512)
def _dtype_for(want: np.dtype[Any], found: str, asked: Any) -> np.dtype[Any] | str:
    """Returns the dtype that an array stored as `found` gets if the template has `want`.

    If it cannot be converted, returns a text that says what to do, which may contain ``{path}``.
    """
    have = dtypes.to_numpy(found)
    if dtypes.is_float(have) and asked not in (None, "template"):
        return np.dtype(asked)
    if have == want.newbyteorder("<") or dtypes.widens(have, want):
        return want
    if dtypes.is_integer(have) and dtypes.is_integer(want):
        return want  # `casts.cast` tests the values when the array is read.
    if dtypes.is_float(have) and dtypes.is_float(want):
        return want if asked == "template" else "dtype='template' narrows floats to the template's"
    rule = f"tr.rules.cast({{path!r}}, {want.name!r})"
    return f"one kind of number is not converted to another; use {found} in the template, or {rule}"


def _key_target(path: str, leaf: Any, entry: Entry) -> LeafTarget:
    impl = _key_impl(leaf.dtype)
    expected = f"key<{impl}>[{','.join(map(str, leaf.shape))}]"
    if not isinstance(entry, ArrayEntry) or entry.type != "key":
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        is_data = isinstance(entry, ArrayEntry) and (entry.dtype, entry.shape) == ("uint32", data.shape)
        rule = f"; tr.rules.wrap_key_data({path!r}, {impl!r}) makes keys of this data" if is_data else ""
        _leaf_mismatch(expected, entry, f"only typed keys become typed keys{rule}")
    if entry.impl != impl or visible_shape(entry) != tuple(leaf.shape):
        _leaf_mismatch(expected, entry, "shapes and key implementations must be equal")
    return LeafTarget("key", entry, dtypes.to_numpy(entry.dtype))


@functools.lru_cache(maxsize=64)
def _key_impl(dtype: Any) -> str:
    """Returns the name of a key dtype's implementation. JAX gives it only for keys, so a key is traced."""
    names: list[str] = []
    jax.eval_shape(lambda key: names.append(str(jax.random.key_impl(key))), jax.ShapeDtypeStruct((), dtype))
    return names[0]


def _iterator_target(path: str, leaf: Any, entry: Entry) -> LeafTarget:
    index, count = coordinator.process_index_and_count()
    if not isinstance(entry, IteratorEntry):
        _leaf_mismatch(
            f"the state of a {type(leaf).__name__}", entry, "an iterator takes only the saved state of an iterator"
        )
    try:
        state, saved = iterators.state_for_process(entry, index, count)
    except UnsupportedError as error:
        raise UnsupportedError(f"{path}: {error}") from error.__cause__
    if saved != count:
        _leaf_mismatch(
            f"the states of {count} iterators, one per process",
            f"those of {saved}",
            f"restore with that many processes, or put `...` in its place and set it yourself, to one of the states in "
            f"tr.open(path)[{path!r}] (Grain's ElasticIterator has one state for any number of processes, and so has "
            "what mixes or zips such iterators alone)",
        )
    return LeafTarget("value", value=leaf, state=(state, entry.info))


def missing_target(path: str, leaf: Any, entry: Entry | None, *, allowed: bool) -> LeafTarget:
    """Returns the template's own leaf, for a path at which the checkpoint has nothing, None, or a function.

    allowed: True if the argument `missing` allows that.

    Raises `LeafMismatch` if it is not allowed, and for a leaf of the template that is only a shape.
    """
    found = NOTHING if entry is None else NONE if entry.type == "none" else FUNCTION
    expected = type(leaf).__name__ if type(leaf) in _SCALARS else leaf_text(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        hint = f"the template has only its shape; restore(like=init(), missing=[{path!r}]) takes what init() makes"
        raise LeafMismatch(expected, found, hint)
    if (hint := migration_hints.leaf_hint(type(leaf))) or not allowed:
        raise LeafMismatch(expected, found, hint or f"missing='template' or missing=[{path!r}] takes the template's")
    return LeafTarget("value", value=leaf, filled=True)


def _is_number(entry: ArrayEntry, kind: type) -> bool:
    """Returns True if an array is a single number that converts to the Python type without loss."""
    if entry.shape:
        return False
    dtype = dtypes.to_numpy(entry.dtype)
    if kind is int:
        return dtypes.is_integer(dtype)
    return (kind is bool and dtype.kind == "b") or (kind in (float, complex) and dtypes.widens(dtype, np.dtype(kind)))


def check_width(dtype: np.dtype[Any], found: Entry, why: str = "", leaf: Any = None) -> None:
    """Raises `LeafMismatch` if JAX lacks a dtype, or has it only with `jax_enable_x64`, which is off.

    leaf: the template's. If it has the dtype, the program made it with `jax.enable_x64`, and its arrays keep 64 bits.
    """
    allowed = _canonical(dtype, jax.config.read("jax_enable_x64"))
    if allowed == dtype or (allowed is not None and _has_dtype(leaf, dtype, found)):
        return
    if allowed is None:
        raise LeafMismatch("a dtype that JAX has", describe_entry(found), "restore it into a NumPy array")
    if isinstance(found, ArrayEntry) and found.dtype == dtype.name:
        hint = "switch it on, or restore into NumPy"
        raise LeafMismatch(f"{allowed.name}, because jax_enable_x64 is off", describe_entry(found), hint)
    raise LeafMismatch(
        f"{dtype.name}{why or ' (the template has it)'}, which JAX lacks while jax_enable_x64 is off",
        describe_entry(found),
        f"use {allowed.name}, or switch it on",
    )


def _has_dtype(leaf: Any, dtype: np.dtype[Any], found: Entry) -> bool:
    """Returns True if a template's leaf is an array of JAX of this dtype, or the shape of one that was saved so."""
    if isinstance(leaf, _HOST_TYPES) or not hasattr(leaf, "dtype") or leaf.dtype != dtype:
        return False
    return isinstance(leaf, jax.Array) or (isinstance(found, ArrayEntry) and found.dtype == dtype.name)


def is_jax_dtype(dtype: np.dtype[Any]) -> bool:
    """Returns True if JAX has a dtype with the present setting of `jax_enable_x64`."""
    return _canonical(dtype, jax.config.read("jax_enable_x64")) == dtype


@functools.lru_cache(maxsize=512)
def _canonical(dtype: np.dtype[Any], x64: bool) -> np.dtype[Any] | None:  # x64 is only a key of the cache
    return None if dtype.kind in "MmSU" else np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _is_weak(leaf: Any) -> bool:
    return bool(getattr(leaf, "weak_type", False))


def leaf_text(leaf: Any) -> str:
    """Returns what a template's leaf is: its dtype and shape, or its type."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return type(leaf).__name__ if shape is None else f"{dtype}[{','.join(map(str, shape))}]"


def _leaf_mismatch(expected: str, found: Entry | str, hint: str) -> NoReturn:
    raise LeafMismatch(expected, found if isinstance(found, str) else describe_entry(found), hint)
