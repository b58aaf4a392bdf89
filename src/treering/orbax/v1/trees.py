"""Translates trees for saves and loads: dtypes of the context, and abstract leaves."""

from typing import Any, Protocol

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
from ..leaf_templates import LeafTemplate, Leaves, host_template, is_resized, resized
from .context import Context
from .metadata_types import ArrayMetadata


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
    leaves = Leaves(part._source, strict=strict)

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


PyTree = PyTreeOf = PyTreeKey = PyTreeKeyPath = JsonType = Leaf = AbstractLeaf = Any
Shape = tuple[int, ...]
DType = Any
Scalar = int | float | np.number[Any] | bytes | bool
AbstractScalar = Scalar


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
