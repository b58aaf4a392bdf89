"""The user's metadata as JSON: the parts of configurations become dicts, lists, text, numbers, bools and None."""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping, MutableSequence
from typing import Any

import jax
import numpy as np
from jax import core

from ..errors import UnsupportedError

_DEEPEST = 100


def plain(value: Any, where: str = "metadata", depth: int = 0) -> Any:
    """A value as it comes back from a format's JSON. Raises an `UnsupportedError` that names a part that would not.

    Formats keep NaN and infinities. Mappings, `ConfigDict`s, dataclasses and named tuples become dicts; other tuples
    and mutable sequences become lists, paths text, and scalars of NumPy and JAX numbers.
    """
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if depth > _DEEPEST:
        raise UnsupportedError(f"{where[:100]}…: nested more than {_DEEPEST} levels deep, or within itself")
    if kind is int:
        if not -(2**63) <= value < 2**64:
            raise UnsupportedError(f"{where}: an integer beyond 64 bits; write it as text")
        return value
    if kind in (list, tuple) or (isinstance(value, MutableSequence) and not isinstance(value, bytearray)):
        return [plain(item, f"{where}[{n}]", depth + 1) for n, item in enumerate(value)]
    if (items := _items(value, where)) is not None:
        return {name: plain(item, f"{where}[{name!r}]", depth + 1) for name, item in items}
    if isinstance(value, pathlib.PurePath):
        return os.fspath(value)
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return plain(_scalar(value, where), where, depth)
    raise _refusal(value, where)


def _items(value: Any, where: str) -> Iterable[tuple[str, Any]] | None:
    """The names and values of what becomes a dict; None for anything else."""
    if dataclasses.is_dataclass(type(value)):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(type(value))]
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        return None if names is None else zip(names, value, strict=True)
    configs: Any = getattr(sys.modules.get("ml_collections"), "ConfigDict", Mapping)  # it is no Mapping
    if not isinstance(value, Mapping | configs):
        return None
    try:
        items = list(value.items())
    except Exception as error:  # of a ConfigDict with a placeholder that must be given
        raise UnsupportedError(f"{where}: {error}") from error
    for name, _ in items:
        if type(name) is not str:
            raise UnsupportedError(f"{where}: the key {name!r} is a {type(name).__name__}; JSON has only text as keys")
    return items


def _scalar(array: Any, where: str) -> Any:
    """A number, bool or text of Python from an array without axes."""
    if array.shape == () and not isinstance(array, core.Tracer):
        is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
        item = None if is_key else np.asarray(array).item()
        if type(item) in (bool, int, float, str):
            return item
    raise _refusal(array, where)


def _refusal(value: Any, where: str) -> UnsupportedError:
    what = f"an array of shape {list(value.shape)}" if getattr(value, "shape", ()) else f"a {type(value).__qualname__}"
    return UnsupportedError(
        f"{where}: {what} is not JSON; pass dicts, lists, text, numbers, bools and None, or what holds these: "
        "ConfigDicts, dataclasses, paths, scalars (and vars(…) of a Namespace); arrays belong into the tree"
    )
