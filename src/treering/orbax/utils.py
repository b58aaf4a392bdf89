"""The functions of the namespaces `utils` and `test_utils` of Orbax that programs call."""

import os
import pathlib
import shutil
from typing import Any

import jax
import numpy as np

from ..errors import UnsupportedError
from ..stores import absolute
from .leaf_templates import real_sharding
from .namespaces import lookup
from .run import as_path

__getattr__ = lookup("utils")


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


def erase_and_create_empty(directory: str | os.PathLike[str]) -> Any:
    """Deletes a directory with everything in it, makes an empty one, and returns its path.

    Raises `UnsupportedError` for a directory in a bucket, and `FileNotFoundError` if its parent is missing.
    """
    path = absolute(directory)
    if "://" in path:
        raise UnsupportedError(f"{path}: expected a directory on a disk; delete the objects in the bucket yourself")
    if os.path.lexists(path):
        shutil.rmtree(path)
    pathlib.Path(path).mkdir()
    return as_path(path)
