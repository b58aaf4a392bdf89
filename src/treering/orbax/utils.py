"""The namespace `utils` of Orbax: the functions that programs call."""

from typing import Any

import jax
import numpy as np

from .leaf_templates import real_sharding
from .multihost import broadcast_one_to_all, is_primary_host, reached_preemption, sync_global_processes
from .step import (
    any_checkpoint_step,
    checkpoint_steps,
    checkpoint_steps_paths,
    step_from_checkpoint_name,
)
from .step import is_path_finalized as is_checkpoint_finalized

sync_global_devices = sync_global_processes

__all__ = [
    "any_checkpoint_step",
    "broadcast_one_to_all",
    "checkpoint_steps",
    "checkpoint_steps_paths",
    "is_checkpoint_finalized",
    "is_primary_host",
    "is_scalar",
    "reached_preemption",
    "step_from_checkpoint_name",
    "sync_global_devices",
    "sync_global_processes",
    "to_shape_dtype_struct",
]


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
