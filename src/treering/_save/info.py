"""Encodes the step, the metrics and the metadata that a save records with the tree."""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping, MutableSequence
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np
from jax import core

from .._core.entries import step_number
from .._core.values import floats_to_text
from .._pytree.devices import encode_metrics
from .._version import __version__
from ..errors import UnsupportedError

_MAX_DEPTH = 100


class Info(NamedTuple):
    """The information that a save records together with the tree."""

    step: int | None
    metrics: dict[str, float | str]
    metadata: msgspec.Raw | None
    metadata_floats: list[str]
    software: dict[str, str]


def encode_info(step: int | None, metrics: Mapping[str, Any] | None, metadata: Any) -> Info:
    """Encodes the information that is recorded with the tree, as it is now.

    Raises `MismatchError` for a bad step or metric, and `UnsupportedError` for metadata that is not JSON.
    """
    number = None if step is None else step_number(step)
    numbers = {} if metrics is None else encode_metrics(metrics)
    metadata_floats: list[str] = []
    raw = None
    try:
        if metadata is not None:
            metadata = floats_to_text(metadata_to_json(metadata), "", metadata_floats)
            raw = msgspec.Raw(msgspec.json.encode(metadata))
        msgspec.json.encode(numbers)
    except (UnicodeEncodeError, OverflowError) as error:
        raise UnsupportedError(f"metadata and the names of metrics must be valid Unicode and JSON: {error}") from None
    software = {"treering": __version__, "jax": jax.__version__, "numpy": np.__version__}
    return Info(number, numbers, raw, metadata_floats, software)


def metadata_to_json(value: Any, where: str = "metadata", depth: int = 0) -> Any:
    """Returns a value as a restore will return it, made of JSON values only.

    Mappings, `ConfigDict`s, dataclasses and named tuples become dicts. Other tuples and mutable sequences become lists,
    paths become text, and scalars of NumPy and JAX become Python numbers. NaN and infinities stay, because the formats
    keep them. Raises an `UnsupportedError` that names the first part that JSON cannot hold.
    """
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if depth > _MAX_DEPTH:
        raise UnsupportedError(f"{where[:100]}…: nested more than {_MAX_DEPTH} levels deep, or within itself")
    if kind is int:
        if not -(2**63) <= value < 2**64:
            raise UnsupportedError(f"{where}: an integer beyond 64 bits; write it as text")
        return value
    if kind in (list, tuple) or (isinstance(value, MutableSequence) and not isinstance(value, bytearray)):
        return [metadata_to_json(item, f"{where}[{n}]", depth + 1) for n, item in enumerate(value)]
    if (items := _items(value, where)) is not None:
        return {name: metadata_to_json(item, f"{where}[{name!r}]", depth + 1) for name, item in items}
    if isinstance(value, pathlib.PurePath):
        return os.fspath(value)
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return metadata_to_json(_scalar(value, where), where, depth)
    raise _unsupported(value, where)


def _items(value: Any, where: str) -> Iterable[tuple[str, Any]] | None:
    """Returns the names and values of a value that becomes a dict, and None for any other value."""
    if dataclasses.is_dataclass(type(value)):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(type(value))]
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        return None if names is None else zip(names, value, strict=True)
    # A `ConfigDict` is not a `Mapping`. A program that holds one has imported ml_collections already.
    configs: Any = getattr(sys.modules.get("ml_collections"), "ConfigDict", Mapping)
    if not isinstance(value, Mapping | configs):
        return None
    try:
        items = list(value.items())
    except Exception as error:  # A `ConfigDict` raises for a required placeholder that has no value.
        raise UnsupportedError(f"{where}: {error}") from error
    for name, _ in items:
        if type(name) is not str:
            raise UnsupportedError(f"{where}: the key {name!r} is a {type(name).__name__}; JSON has only text as keys")
    return items


def _scalar(array: Any, where: str) -> Any:
    """Returns the Python number, bool or text of an array without axes. Raises `UnsupportedError` for other arrays."""
    if array.shape == () and not isinstance(array, core.Tracer):
        is_plain = not jax.numpy.issubdtype(array.dtype, jax.dtypes.extended)  # keys are not
        item = np.asarray(array).item() if is_plain else None
        if type(item) in (bool, int, float, str):
            return item
    raise _unsupported(array, where)


def _unsupported(value: Any, where: str) -> UnsupportedError:
    what = f"an array of shape {list(value.shape)}" if getattr(value, "shape", ()) else f"a {type(value).__qualname__}"
    return UnsupportedError(
        f"{where}: {what} is not JSON; pass dicts, lists, text, numbers, bools and None, or objects made of these: "
        "ConfigDicts, dataclasses, paths, scalars (and vars(…) of a Namespace); arrays belong in the tree"
    )
