"""Small helpers about directories and leaves; the namespace `utils` of Orbax."""

import os
from typing import Any

import jax
import numpy as np

from .._run.run_layout import steps
from .leaf_templates import real_sharding

__all__ = ["any_checkpoint_step", "checkpoint_steps", "is_scalar", "to_shape_dtype_struct"]


def checkpoint_steps(checkpoint_dir: str | os.PathLike[str]) -> list[int]:
    """Returns the steps in a directory, in ascending order."""
    return steps(checkpoint_dir)


def any_checkpoint_step(checkpoint_dir: str | os.PathLike[str]) -> int | None:
    """Returns a step in a directory, or None if it has none."""
    return next(iter(steps(checkpoint_dir)), None)


def is_scalar(value: Any) -> bool:
    """Returns True for a Python number or a scalar of NumPy."""
    return isinstance(value, int | float | np.number)


def to_shape_dtype_struct(x: Any, dtype: Any = None, scalar_dtype: Any = None) -> Any:
    """Returns the shape of an array, of its metadata or of a number, as a leaf of a template.

    dtype: the dtype of the result; by default that of the array.
    scalar_dtype: the Python type that a number becomes.
    """
    if isinstance(x, bool | int | float | complex):
        return x if scalar_dtype is None else scalar_dtype(x)
    place = real_sharding(getattr(x, "sharding", None))
    return jax.ShapeDtypeStruct(x.shape, x.dtype if dtype is None else dtype, sharding=place)
