"""Truncates arrays, or pads them with zeros, to other shapes than they were saved with."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np

from .._core import dtypes
from .._core.entries import ArrayEntry, Entry
from ..errors import MismatchError


class LeafTemplate(NamedTuple):
    """A leaf of a template for `treering.restore`, and a function that makes the result from the restored leaf."""

    leaf: Any
    finish: Callable[[Any], Any] | None = None


def host_template(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Returns a NumPy array that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def is_resized(entry: Entry, shape: Any) -> TypeGuard[ArrayEntry]:
    """Returns True if an array was saved with another shape."""
    return isinstance(entry, ArrayEntry) and entry.type != "key" and shape is not None and tuple(shape) != entry.shape


def resized(entry: ArrayEntry, wanted: Any, dtype: Any, place: Any, *, on_host: bool) -> LeafTemplate:
    """Returns the template of an array that gets another shape of as many axes.

    place: its sharding, None for the default device.
    """
    shape = tuple(wanted)
    if len(shape) != len(entry.shape):
        raise MismatchError(f"{entry.path}: strict=False: expected {len(entry.shape)} axes, found the shape {shape}")

    def finish(array: Any) -> Any:
        made = np.zeros(shape, array.dtype)
        kept = tuple(slice(min(sizes)) for sizes in zip(shape, array.shape, strict=True))
        made[kept] = array[kept]
        if on_host or place is None:
            return made if on_host else jax.numpy.asarray(made)
        return jax.make_array_from_callback(shape, place, lambda index: made[index])

    return LeafTemplate(
        host_template(entry.shape, dtypes.to_numpy(entry.dtype) if dtype is None else np.dtype(dtype)), finish
    )
