"""Translates the arguments of items into trees of Treering."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from .._core import casts, skeleton
from .._core.leaf_paths import join_names
from .._pytree import flax, variable_levels, walk
from ..errors import MismatchError, UnsupportedError
from . import handler_files, nodes
from .arguments import tree_in
from .errors import UnsupportedValueError
from .item_restore import (
    DEFAULT_ITEM,
    KEY_METADATA,
    KEY_NAME,
    item_handlers,
    item_metadata,
    item_names,
    restore_item,
    restore_items,
)
from .kinds import Kind, handler_of, handlers_in, resolve
from .tree_restore import none_for_empty

__all__ = [
    "DEFAULT_ITEM",
    "custom_metadata",
    "format_options",
    "handler_of",
    "item_handlers",
    "item_metadata",
    "item_names",
    "restore_item",
    "restore_items",
    "save_items",
    "save_tree",
    "with_levels",
]

_log = logging.getLogger("treering")


def format_options(write: str | None, *, several: bool) -> dict[str, Any]:
    """Returns the arguments of `treering.save` that choose the format.

    write: "treering" or "orbax"; by default what the environment variable `TREERING_ORBAX_WRITE` says, or "treering".
    several: True if the root of the tree has the items as children.

    Raises `MismatchError` for another format.
    """
    chosen = write or os.environ.get("TREERING_ORBAX_WRITE") or "treering"
    if chosen not in ("treering", "orbax"):
        raise MismatchError(f"write={chosen!r}: expected 'treering' or 'orbax'")
    return {"format": "orbax", "composite": several} if chosen == "orbax" else {}


def save_tree(args: Any, handler: Any = None) -> Any:
    """Returns the tree of one item.

    Raises `MismatchError` for arguments without an item, or that do not belong to the handler, and the errors of the
    program's own handler.
    """
    kind, own = resolve(args, handler)
    if isinstance(args, handler_files.CallArgs) or kind == "own":
        return handler_files.save_files(own, args)
    if kind is None or args is None:
        raise MismatchError("args: expected arguments that say what to save, such as args.StandardSave(tree), got None")
    if kind == "composite":
        return save_items(args, handlers_in(handler))
    item = args.item
    if kind in ("standard", "pytree"):
        return _tree_to_save(kind, args)
    if kind == "json":
        return nodes.json_item(item)
    if kind == "numpy-key":
        if not isinstance(item, tuple | dict):
            raise UnsupportedValueError(
                f"item: expected a tuple or a dict of numpy.random.get_state, found a {type(item).__name__}"
            )
        return {KEY_NAME: item, KEY_METADATA: {"legacy": isinstance(item, tuple)}}
    if kind in ("array", "jax-key"):
        if not (hasattr(item, "dtype") or (kind == "array" and isinstance(item, int | float | complex))):
            raise UnsupportedError(f"item: expected an array or a number, found a {type(item).__name__}")
        return _cast("", item, args.save_args)
    return item


def save_items(args: Mapping[str, Any], handlers: Any = None) -> nodes.Composite:
    """Returns the tree of several items. `handlers` is a mapping by name, or a registry."""
    found = {name: one for name, one in args.items() if one is not None}
    if not found:
        raise MismatchError("args: expected a Composite with at least one item, found none")
    return nodes.composite({name: save_tree(one, handler_of(name, one, handlers)) for name, one in found.items()})


def custom_metadata(args: Any, given: Any = None) -> Any:
    """Returns the metadata to record: those of the call (`given`), or else those of the arguments.

    Raises `UnsupportedValueError` for both, and for those of one of several items: a checkpoint has one.
    """
    parts = list(args.values()) if isinstance(args, Mapping) else [args]
    own = [found for one in parts if (found := getattr(one, "custom_metadata", None)) is not None]
    if own and (given is not None or isinstance(args, Mapping)):
        raise UnsupportedValueError(
            "custom_metadata: expected it once, for the entire checkpoint; pass it to save() and not to an item"
        )
    return given if given is not None or not own else own[0]


def _tree_to_save(kind: Kind, args: Any) -> Any:
    item, save_args = args.item, args.save_args
    if item is None:
        raise MismatchError("item: expected a tree to save, found None")
    if tree_in(item) is not item:
        raise MismatchError("item: expected a tree of arrays, found the metadata of one")
    item = flax.unshare(item, objects=True)  # Orbax stores each place of a Variable, and items are restored one by one.
    flat = walk.flatten_tree(item)
    if not flat.leaves and len(flat.skeleton) == 1:
        raise MismatchError("item: expected a tree to save, found an empty item")
    if kind == "standard" and list(flat.paths) == [""]:
        raise MismatchError(f"item: expected a tree, found a single {type(item).__name__}; use args.ArraySave")
    if getattr(args, "ocdbt_target_data_file_size", None) is not None:
        _log.warning("ocdbt_target_data_file_size= has no effect; Treering chooses the sizes of files")
    if save_args is None:
        return with_levels(item, flat)
    given = walk.flatten_tree(save_args)
    by_path = dict(zip(given.paths, given.leaves, strict=True))
    places = {path for _, path, _ in skeleton.containers(flat.skeleton)}
    if rest := [path for path in by_path if path not in places]:
        raise MismatchError(f"save_args: expected the structure of the item, found also {join_names(tuple(rest))}")
    leaves = [_cast(path, leaf, by_path.get(path)) for path, leaf in zip(flat.paths, flat.leaves, strict=True)]
    return with_levels(walk.unflatten(item, leaves, flat.structure), flat._replace(leaves=leaves))


def with_levels(item: Any, flat: walk.FlatTree) -> Any:
    """Returns a tree with a level for each box of Flax, such as `value` for an NNX Variable, as Orbax saves it.

    A restore without a target has the level, too. Targets with and without boxes fit it.
    """
    if not flat.boxes:
        return item
    nodes = variable_levels.skeleton_with_levels(flat.skeleton, flat.boxes, variable_levels.LEVEL_KINDS[0])
    return skeleton.build(*none_for_empty(nodes, flat.leaves))


def _cast(path: str, leaf: Any, save_args: Any) -> Any:
    """Returns a leaf in the dtype of its `SaveArgs`. Raises `MismatchError` for values that the dtype lacks."""
    import jax
    import numpy as np

    dtype = getattr(save_args, "dtype", None)
    if save_args is not None and not hasattr(save_args, "aggregate"):
        raise MismatchError(f"save_args: {path or '(root)'}: expected SaveArgs, found {type(save_args).__name__}")
    if dtype is None or leaf is None or isinstance(leaf, str | bytes):
        return leaf
    if not isinstance(getattr(leaf, "dtype", dtype), np.dtype | type):  # The save refuses what only JAX has.
        return leaf
    dtype = np.dtype(dtype)
    if isinstance(leaf, bool | int | float | complex):
        return casts.cast(np.asarray(leaf), dtype, path, can_clip=False).item()
    if leaf.dtype == dtype:
        return leaf
    for part in [one.data for one in leaf.addressable_shards] if isinstance(leaf, jax.Array) else [leaf]:
        if not casts.is_in_range(part, dtype):  # A device can tell, so that arrays need not leave it.
            casts.cast(np.asarray(part), dtype, path, can_clip=False)
    return leaf.astype(dtype)
