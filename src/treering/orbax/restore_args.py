"""Defines the options of single leaves in saves and restores."""

import dataclasses
from typing import Any

from ..errors import MismatchError
from .hints import warn_unused

PLACEHOLDER = ...  # a leaf of a template that stays as it is


@dataclasses.dataclass
class SaveArgs:
    """Options of a leaf in a save.

    dtype: the dtype to which the leaf is cast.
    aggregate, chunk_byte_size, shard_axes: have no effect, which is logged.
    """

    aggregate: bool = False
    dtype: Any = None
    chunk_byte_size: int | None = None
    shard_axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        warn_unused(
            "SaveArgs",
            aggregate=(self.aggregate, False),
            chunk_byte_size=(self.chunk_byte_size, None),
            shard_axes=(tuple(self.shard_axes), ()),
        )


@dataclasses.dataclass
class RestoreArgs:
    """Options of a leaf in a restore.

    restore_type: `numpy.ndarray`, `jax.Array`, a Python type, or None for the kind that was saved.
    dtype: the dtype of the result. Floats are cast to floats, and integers to integers that hold the values.
    """

    restore_type: Any = None
    dtype: Any = None


def _jax_array() -> Any:
    import jax

    return jax.Array


@dataclasses.dataclass
class ArrayRestoreArgs(RestoreArgs):
    """Options of an array of JAX.

    sharding: its place; or else `mesh` and `mesh_axes`; or else the saved place.
    global_shape, shape: the shape that is expected. Unless `strict`, the array is truncated, or padded with zeros.
    """

    restore_type: Any = dataclasses.field(default_factory=_jax_array)
    mesh: Any = None
    mesh_axes: Any = None
    sharding: Any = None
    global_shape: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        if self.shape is not None and self.global_shape is not None and self.shape != self.global_shape:
            raise MismatchError(
                f"ArrayRestoreArgs: expected shape= and global_shape= to be equal, found {self.shape} and "
                f"{self.global_shape}"
            )
        self.shape = self.global_shape = self.global_shape if self.shape is None else self.shape


@dataclasses.dataclass
class SingleReplicaArrayRestoreArgs(ArrayRestoreArgs):
    """Options of an array that one replica reads. Treering divides reads between processes by itself; see `read=`."""

    single_replica_sharding: Any = None
