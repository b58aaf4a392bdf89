"""Gives each leaf of a resumed job the type, dtype and weak type that it was saved with."""

import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._core import dtypes
from .._core.entries import ArrayEntry, Entry, ValueEntry
from .._core.leaf_paths import join_names
from .._pytree.leaves import is_function
from .leaf_targets import LeafTarget, check_width, target_of

_log = logging.getLogger("treering")
_SCALARS = frozenset((bool, int, float, complex, str, bytes))


def saved_target(path: str, leaf: Any, entry: Entry, asked: Any, records_kinds: bool) -> LeafTarget:
    """Returns the target that has the saved kind. The template's leaf says only the shape.

    asked: the argument `dtype` of the restore, which takes precedence over the saved dtype.

    Raises `LeafMismatch` for another shape, and if only one of the two is text.
    """
    shape = _shape_of(leaf)
    if isinstance(entry, ValueEntry):
        text = entry.type in ("str", "bytes")
        other = entry.type != type(leaf).__name__ if text else type(leaf) in (str, bytes)
        if shape != () or other or not (text or entry.type in ("bool", "int", "float", "complex")):
            return target_of(path, leaf, entry, asked, records_kinds)
        return LeafTarget("value", value=entry.decode())
    is_key = entry.type == "key"
    if type(leaf) in (str, bytes) or shape != _shape_as(leaf, entry):
        return target_of(path, leaf, entry, asked, records_kinds)
    dtype = dtypes.to_numpy(entry.dtype)
    if is_key:
        return LeafTarget("key", entry, dtype)
    want = dtype
    if asked is not None and dtypes.is_float(dtype):
        own = getattr(leaf, "dtype", dtype)
        want = np.dtype(asked) if asked != "template" else np.dtype(own) if dtypes.is_float(np.dtype(own)) else dtype
    if entry.type in ("jax", "jax-weak"):
        check_width(want, entry, leaf=leaf)
        return LeafTarget("jax", entry, want, entry.type == "jax-weak" and want == dtype)
    return LeafTarget("numpy-scalar" if entry.type == "numpy-scalar" else "numpy", entry, want)


def _shape_of(leaf: Any) -> tuple[int, ...] | None:
    if type(leaf) in _SCALARS:
        return ()
    shape = getattr(leaf, "shape", None)
    return tuple(shape) if shape is not None and hasattr(leaf, "dtype") else None


def _shape_as(leaf: Any, entry: ArrayEntry) -> tuple[int, ...] | None:
    """Returns the shape that a leaf must have for an entry, or None if no array of its dtype takes the entry.

    Typed keys take keys and their data, which has one more axis. Other extended dtypes of JAX are never saved.
    """
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return entry.shape
    keys = jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
    return entry.shape[:-1] if keys and (entry.type == "key" or entry.dtype == "uint32") else None


def log_changes(name: str, paths: Sequence[str], leaves: Sequence[Any], targets: Sequence[LeafTarget]) -> None:
    """Logs the leaves that were saved as another kind than `init` gives: another dtype at WARNING, the rest at INFO."""
    known: dict[Any, tuple[str, bool]] = {}  # texts by kind, because thousands of leaves may be of one kind
    found: dict[bool, list[str]] = {True: [], False: []}
    for path, leaf, target in zip(paths, leaves, targets, strict=True):
        kind, make = type(leaf), target.make
        key = kind, getattr(leaf, "dtype", None), getattr(leaf, "weak_type", False), make, target.dtype, target.weak
        if make == "value":
            key = (*key, type(target.value), target.filled, target.state is None)
        if (change := known.get(key)) is None:
            change = known[key] = (
                _change(_kind_of(leaf), _kind_made(target)) if _has_kind(leaf, target) else ("", False)
            )
        text, is_dtype = change
        if text:
            found[is_dtype].append(f"{path or '(root)'} ({text})")
    for is_dtype, listed in found.items():
        if listed:
            _log.log(
                logging.WARNING if is_dtype else logging.INFO,
                "%s: the saved state has another %s than init() gives, and it is kept for %d leaves: %s%s",
                name,
                "dtype" if is_dtype else "kind of leaf",
                len(listed),
                join_names(tuple(listed)),
                "; dtype='template' takes the dtype of init" if is_dtype else "",
            )


_Kind = tuple[str, Any, bool]  # a name, the dtype, and True for a weak type


def _has_kind(leaf: Any, target: LeafTarget) -> bool:
    has = type(leaf) in _SCALARS or (hasattr(leaf, "dtype") and not is_function(leaf))
    return has and not target.filled and target.state is None


def _kind_of(leaf: Any) -> _Kind:
    if type(leaf) in _SCALARS:
        return f"Python {type(leaf).__name__}", None, False
    on_host = isinstance(leaf, np.ndarray | np.generic)
    return "NumPy" if on_host else "JAX", leaf.dtype, not on_host and bool(getattr(leaf, "weak_type", False))


def _kind_made(target: LeafTarget) -> _Kind:
    if target.make == "value":
        return f"Python {type(target.value).__name__}", None, False
    if target.make == "key" or target.make == "number":
        return "JAX", None, False
    return "JAX" if target.make == "jax" else "NumPy", target.dtype, target.weak


def _change(own: _Kind, saved: _Kind) -> tuple[str, bool]:
    """Returns a text that says how two kinds differ, or "", and True if their dtypes differ."""
    if own == saved or (saved[1] is None and saved[0] == "JAX"):  # `saved` is a key, which only needs the same shape
        return "", False
    both = own[1] is not None and saved[1] is not None
    if both and own[1] != saved[1]:
        return f"init {own[1]}, saved {saved[1]}", True
    text = [f"{what}{' ' + str(dtype) if dtype is not None else ''}{', weakly typed' if weak else ''}"
            for what, dtype, weak in (own, saved)]  # fmt: skip
    return f"init {text[0]}, saved {text[1]}", False
