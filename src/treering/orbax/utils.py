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
    "fully_replicated_host_local_array_to_global_array",
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


def fully_replicated_host_local_array_to_global_array(arr: jax.Array) -> jax.Array:
    """Returns an array that each process has on all of its devices as one array, replicated on all devices of the job.

    arr: its copies, or the result of `jax.pmap`, whose first axis counts the devices.

    Raises `ValueError` if the array is not on all devices of this process.
    """
    place = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("x",)), jax.sharding.PartitionSpec())
    copies = [shard.data for shard in sorted(arr.addressable_shards, key=lambda shard: shard.device.id)]
    if copies[0].shape != arr.shape:
        copies = [one[0] for one in copies]
    return jax.make_array_from_single_device_arrays(copies[0].shape, place, copies)
