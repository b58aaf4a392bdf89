"""Helpers that make the options of restores; the namespace `checkpoint_utils` of Orbax."""

from typing import Any

import jax
import numpy as np

from ..errors import MismatchError
from .arguments import tree_in
from .following import checkpoints_iterator, wait_for_new_checkpoint
from .leaf_templates import real_sharding
from .restore_args import PLACEHOLDER, ArrayRestoreArgs, RestoreArgs

__all__ = ["PLACEHOLDER", "checkpoints_iterator", "construct_restore_args", "wait_for_new_checkpoint"]


def construct_restore_args(
    target: Any,
    sharding_tree: Any = None,
    set_global_shape: bool = True,
    support_layout: bool = False,
    strict: bool = True,
) -> Any:
    """Returns a tree of `RestoreArgs` that restores leaves of the kinds that a target has.

    target: arrays, `jax.ShapeDtypeStruct`, Python numbers, text, metadata of leaves, or `PLACEHOLDER`. A shape without
        a sharding becomes a NumPy array.
    sharding_tree: shardings with the structure of the target; by default its own.
    set_global_shape: True to expect the shapes of the target.
    support_layout: True to take the layouts of the target, too.

    Raises `MismatchError` for a leaf of another type.
    """

    def place(leaf: Any) -> Any:
        layout = getattr(leaf, "format", None) if support_layout else None
        return layout if layout is not None else getattr(leaf, "sharding", None)

    def args(leaf: Any, sharding: Any) -> Any:
        return _args(leaf, sharding, set_global_shape, strict)

    tree = tree_in(target)
    places = jax.tree.map(place, tree) if sharding_tree is None else tree_in(sharding_tree)
    if sharding_tree is None:  # None is no leaf for JAX, and most leaves on the host have no sharding.
        made = jax.tree.map(lambda leaf: args(leaf, place(leaf)), tree)
    else:
        made = jax.tree.map(args, tree, places)
    return made


def _args(leaf: Any, sharding: Any, set_shape: bool, strict: bool) -> Any:
    name = type(leaf).__name__
    if leaf is PLACEHOLDER:
        return RestoreArgs(restore_type=type(PLACEHOLDER))
    if isinstance(leaf, str | bytes) or name == "StringMetadata":
        return RestoreArgs(restore_type=str if name == "StringMetadata" else type(leaf))
    if name == "ScalarMetadata":
        return RestoreArgs(restore_type=type(np.dtype(leaf.dtype).type(0).item()), dtype=leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    if isinstance(leaf, jax.Array) or (isinstance(leaf, jax.ShapeDtypeStruct) or name == "ArrayMetadata"):
        sharding = real_sharding(sharding)
        if sharding is None and not isinstance(leaf, jax.Array):
            return RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        shape = tuple(leaf.shape) if set_shape and not key else None
        dtype = None if key else leaf.dtype
        return ArrayRestoreArgs(sharding=sharding, global_shape=shape, dtype=dtype, strict=strict)
    if isinstance(leaf, int | float | complex | np.generic):
        return RestoreArgs(restore_type=type(leaf))
    raise MismatchError(f"target: expected arrays, shapes, numbers, text or metadata, found a {type(leaf).__name__}")
