"""Translates trees for saves and loads: dtypes of the context, abstract leaves, and classes of metadata."""

import dataclasses
import datetime
from typing import Any, Generic, Protocol, TypeVar

import jax
import numpy as np

from ..._core.entries import ArrayEntry, Entry
from ..._pytree import flax, walk
from ..._pytree import leaves as _leaves
from ..._restore.checkpoint import Checkpoint
from ...errors import MismatchError, UnsupportedError
from .. import items, tree_restore
from ..arguments import PyTreeSave, RestoreArgs, SaveArgs
from ..errors import UnsupportedValueError
from ..metadata import ShardingMetadata
from ..tree_restore import LeafTemplate, LeafTemplates, host_template, is_resized, resized
from .context import Context

T = TypeVar("T")
PyTreeMetadata = Any  # a tree of dicts and lists with abstract leaves
PyTree = PyTreeOf = PyTreeKey = PyTreeKeyPath = JsonType = Leaf = AbstractLeaf = Any
Shape = tuple[int, ...]
DType = Any
Scalar = int | float | np.number[Any] | bytes | bool
AbstractScalar = Scalar


@dataclasses.dataclass(frozen=True)
class ArrayMetadata:
    """A JAX array in a checkpoint. It is an abstract leaf: `load` restores a JAX array by it."""

    shape: tuple[int, ...]
    dtype: Any
    sharding_metadata: ShardingMetadata | None = None
    storage_metadata: Any = dataclasses.field(default=None, compare=False)
    weak_type: bool = False

    @property
    def sharding(self) -> Any:
        """The saved place in this job, None for the default device. Raises `MismatchError` if this job lacks it."""
        return None if self.sharding_metadata is None else self.sharding_metadata.to_jax_sharding()


@dataclasses.dataclass(frozen=True)
class NumpyMetadata:
    """A NumPy array in a checkpoint. It is an abstract leaf: `load` restores a NumPy array by it."""

    shape: tuple[int, ...]
    dtype: Any
    storage_metadata: Any = dataclasses.field(default=None, compare=False)


class CheckpointMetadata(Generic[T]):
    """The metadata of a checkpoint. `metadata` is a tree of abstract leaves, or a dict of them by name.

    Times are nanoseconds since 1970, or None. Treering records one time for each checkpoint, that of the commit.
    """

    def __init__(
        self,
        path: Any,
        *,
        metadata: T,
        init_timestamp_nsecs: int | None = None,
        commit_timestamp_nsecs: int | None = None,
        custom_metadata: Any = None,
    ):
        self.path, self.metadata, self.custom_metadata = path, metadata, custom_metadata
        self.init_timestamp_nsecs, self.commit_timestamp_nsecs = init_timestamp_nsecs, commit_timestamp_nsecs

    @property
    def init_timestamp(self) -> datetime.datetime | None:
        """The time at which the save began, in UTC."""
        return as_time(self.init_timestamp_nsecs)

    @property
    def commit_timestamp(self) -> datetime.datetime | None:
        """The time of the commit, in UTC."""
        return as_time(self.commit_timestamp_nsecs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def as_time(nanoseconds: int | None) -> datetime.datetime | None:
    """Returns nanoseconds since 1970 as a time in UTC."""
    return None if nanoseconds is None else datetime.datetime.fromtimestamp(nanoseconds / 1e9, datetime.UTC)


def as_nanoseconds(time: datetime.datetime | None) -> int | None:
    """Returns a time in nanoseconds since 1970."""
    return None if time is None else int(time.timestamp() * 1_000_000) * 1000


def unsupported_leaf(tree: Any) -> str | None:
    """Returns the reason why a tree cannot be saved, None if it can be."""
    try:
        for leaf in jax.tree.leaves(tree):
            _leaves.leaf_kind(type(leaf))
    except UnsupportedError as error:
        return str(error)
    return None


def tree_to_save(tree: Any, context: Context) -> Any:
    """Returns a tree with the dtypes that the context says.

    Raises `MismatchError` for None, and `UnsupportedValueError` (both are a `ValueError`) for leaves of other types.
    """
    if tree is None:
        raise MismatchError("state: expected a tree to save, found None")
    if reason := unsupported_leaf(tree):
        raise UnsupportedValueError(f"state: expected leaves that can be saved, found {reason}")
    tree = flax.unshare(tree, objects=True)  # Orbax stores each place of a Variable.
    flat = walk.flatten_tree(tree)
    if not flat.leaves and len(flat.skeleton) == 1:
        raise MismatchError("state: expected a tree to save, found an empty one")
    saving = context.array.saving
    general, scoped = saving.storage_options.dtype, saving.scoped_storage_options_creator
    if general is None and scoped is None:
        return items.with_levels(tree, flat)

    def save_args(path: Any, leaf: Any) -> SaveArgs:
        own = None if scoped is None else scoped(path, leaf)
        if own is None:
            return SaveArgs(dtype=general)
        return SaveArgs(
            dtype=general if own.dtype is None else own.dtype,
            chunk_byte_size=own.chunk_byte_size,
            shard_axes=own.shard_axes or (),
        )

    return items.save_tree(PyTreeSave(tree, jax.tree_util.tree_map_with_path(save_args, tree)))


def load_tree(part: Checkpoint, abstract: Any, context: Context) -> Any:
    """Returns the tree of a checkpoint, or of a part of one, like an abstract tree, or without one as it was saved.

    Raises `MismatchError`, which is a `ValueError`, if the two differ.
    """
    if abstract is None:
        return tree_restore.restore_as_saved(part)
    strict = not context.array.loading.enable_padding_and_truncation
    leaves = LeafTemplates(part._source, strict=strict)

    def template(path: str, leaf: Any, entry: Entry) -> LeafTemplate:
        if isinstance(leaf, type):
            kind = jax.Array if leaf is jax.ShapeDtypeStruct else leaf
            return leaves.by_args(entry, entry, RestoreArgs(restore_type=kind))
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None and isinstance(entry, ArrayEntry):
            if not strict and is_resized(entry, leaf.shape):
                return resized(entry, leaf.shape, leaf.dtype, None, on_host=False)
            return LeafTemplate(leaf)  # a JAX array, also if a NumPy array was saved
        return leaves.like(leaf, entry)

    partial = context.pytree.loading.partial_load
    like = jax.tree.map(_standard_leaf, abstract)
    return tree_restore.restore_by(part, like, template, partial=partial)


def _standard_leaf(leaf: Any) -> Any:
    """Returns an abstract leaf as an array, a shape, a number or text."""
    if isinstance(leaf, type):
        return np.dtype(leaf).type(0) if issubclass(leaf, np.generic) else leaf
    if isinstance(leaf, ArrayMetadata):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type)
    has_shape = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    if has_shape and not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        if getattr(leaf, "sharding", None) is not None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return host_template(tuple(leaf.shape), np.dtype(leaf.dtype))
    return leaf


class AbstractArray(Protocol):
    """The shape and the dtype of a NumPy array."""

    shape: Shape | None
    dtype: Any


class AbstractShardedArray(Protocol):
    """The shape, the dtype and the place of a JAX array."""

    shape: Shape | None
    dtype: Any
    sharding: Any


ArrayLike = AbstractArray | AbstractShardedArray
