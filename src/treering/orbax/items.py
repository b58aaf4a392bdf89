"""Translates the arguments of items into trees of Treering, restores items by arguments, and describes them."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from .._core import casts, skeleton
from .._core import source as _source
from .._core.leaf_paths import join_names, key_text
from .._core.skeleton import Node
from .._core.source import HANDLER_FILES, JSON_ITEM, arrays_of, check_not_left_out, is_left_out
from .._pytree import flax, variable_levels, walk
from .._restore.checkpoint import Checkpoint
from ..errors import MismatchError, NotFoundError, UnsupportedError
from . import metadata, nodes, registration, tree_restore
from .arguments import Composite, tree_in
from .errors import ItemNotFoundError, UnsupportedValueError
from .registration import Kind, handler_kind, handler_of, handlers_in, resolve
from .tree_restore import none_for_empty

DEFAULT_ITEM = "default"  # Orbax's name of an only item that the program does not name
_LEAF_NAME = "checkpoint"  # Orbax's name of an item that is a number
KEY_NAME, KEY_METADATA = "np_random_key", "np_random_key_metadata"  # as Orbax names the two parts of such an item
_HANDLER_NAMES = {
    kind: f"treering.orbax.handlers.{name}CheckpointHandler" for kind, name in (("json", "Json"), ("pytree", "PyTree"))
}
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


def item_names(ckpt: Checkpoint) -> tuple[str, ...] | None:
    """Returns the names of the items of a checkpoint, None if it is one tree."""
    return _source.item_names(ckpt._source)


def restore_item(ckpt: Checkpoint, name: str | None, args: Any = None, handler: Any = None) -> Any:
    """Restores an item. The name None stands for the entire checkpoint.

    Raises `ItemNotFoundError`, which is a `KeyError`, if there is no such item, and `MismatchError` if the item does
    not fit the arguments.
    """
    kind, own = resolve(args, handler)
    if isinstance(args, nodes.CallArgs) or kind == "own":
        return _restore_own(ckpt, name, own, args if args is not None else _default_args(own))
    if kind == "composite":
        return restore_items(ckpt, args, handlers_in(handler))
    part = part_of(ckpt, name)
    if is_files(part):
        raise MismatchError(
            f"{ckpt.path}: {name or 'the checkpoint'} was saved by a handler of its own; give its arguments or handler"
        )
    if kind == "standard":
        return tree_restore.restore_as_saved(part) if args is None else tree_restore.restore_standard(part, args)
    if kind == "pytree":
        return tree_restore.restore_as_saved(part) if args is None else tree_restore.restore_pytree(part, args)
    if kind in ("array", "jax-key"):
        if part.format == "orbax" and list(part._source.entries) == [_LEAF_NAME]:
            part = part.at(_LEAF_NAME)
        return tree_restore.restore_leaf(part, getattr(args, "item", None), getattr(args, "restore_args", None))
    if kind == "iterator":
        return restore_iterator(part, getattr(args, "item", None))
    value = tree_restore.restore_as_saved(part)
    is_key = isinstance(value, dict) and set(value) == {KEY_NAME, KEY_METADATA}
    if kind == "numpy-key" or (kind is None and is_key):
        if not is_key:
            raise MismatchError(f"{ckpt.path}: {name}: expected the state of NumPy's generator, found another tree")
        return tuple(value[KEY_NAME]) if value[KEY_METADATA]["legacy"] else value[KEY_NAME]
    return value


def restore_items(ckpt: Checkpoint, args: Mapping[str, Any] | None = None, handlers: Any = None) -> Composite:
    """Restores the items that `args` name, or all items, as results by name."""
    known = item_names(ckpt)
    if not args:
        check_not_left_out(ckpt._source)
    wanted = dict(args.items()) if args else dict.fromkeys(known or (DEFAULT_ITEM,))
    found = {name: restore_item(ckpt, name, one, handler_of(name, one, handlers)) for name, one in wanted.items()}
    return Composite(**found)


def part_of(ckpt: Checkpoint, name: str | None) -> Checkpoint:
    """Returns an item, or the entire checkpoint for None. Raises `ItemNotFoundError` if there is no such item."""
    known = item_names(ckpt)
    if name is None:
        if known == (DEFAULT_ITEM,):  # saved as an item with the name that Orbax gives an item without one
            return ckpt.at(DEFAULT_ITEM)
        if known is not None:
            raise MismatchError(f"{ckpt.path}: expected one tree, found the items {join_names(known)}; use Composite")
        return ckpt
    if known is None:
        if name in (DEFAULT_ITEM, getattr(ckpt._source, "level", "")):
            return ckpt
        raise ItemNotFoundError(f"{ckpt.path}: expected the item {name!r}, found one tree without items")
    if name not in known:
        raise ItemNotFoundError(f"{ckpt.path}: expected the item {name!r}, found {join_names(known) or 'none'}")
    try:
        return ckpt.at(key_text(name))
    except NotFoundError as error:
        raise ItemNotFoundError(str(error)) from None


def is_files(part: Checkpoint) -> bool:
    """Returns True for the files that a handler of the program's own wrote, also if Treering cannot read them."""
    return is_left_out(part._source) or _class_of(part) == HANDLER_FILES


def _class_of(part: Checkpoint) -> str:
    tree = part._source.skeleton
    return tree[0].name if tree and isinstance(tree[0], Node) else ""


def _restore_own(ckpt: Checkpoint, name: str | None, handler: Any, args: Any) -> Any:
    """Restores by the program's own handler, from the files in the checkpoint or a directory of Orbax."""
    if ckpt.format == "orbax":
        level = name or getattr(ckpt._source, "level", "")
        directory = os.path.join(ckpt.path, level) if level else ckpt.path
        if not os.path.isdir(directory):
            raise ItemNotFoundError(f"{ckpt.path}: expected the item {name!r}, found no directory of it")
        return nodes.restore_directory(nodes.path_object(directory), handler, args)
    part = part_of(ckpt, name)
    if not is_files(part):
        raise MismatchError(
            f"{ckpt.path}: {name or 'the checkpoint'} was not saved by a handler of its own; restore it with the "
            f"arguments that it was saved with, not by {type(handler).__name__}"
        )
    return nodes.restore_files(part.restore(), handler, args)


def _default_args(handler: Any) -> Any:
    if not registration.has_registered_args(handler):
        return None
    _, restore = registration.get_registered_args_cls(handler)
    try:
        return restore()
    except TypeError as error:
        raise MismatchError(f"{restore.__name__}: expected arguments for the restore: {error}") from error


def restore_iterator(part: Checkpoint, item: Any) -> Any:
    """Sets the state of an iterator to the saved one, and returns the iterator. Raises `MismatchError` for None."""
    if item is None:
        raise MismatchError("item: expected the iterator whose state is restored, found None")
    part.restore(item)
    if hasattr(item, "start_prefetch"):  # as Grain's own handler does
        item.start_prefetch()
    return item


def item_metadata(ckpt: Checkpoint, name: str | None = None, handlers: Any = None) -> Any:
    """Returns the metadata of an item, or of the entire checkpoint; None for values of JSON and handlers' own files.

    For several items and no name it is a mapping of the items' metadata.
    """
    known = item_names(ckpt)
    if name is None and known not in (None, (DEFAULT_ITEM,)):
        return Composite(**{one: item_metadata(ckpt, one, handlers) for one in known})
    part = part_of(ckpt, name)
    return metadata.tree_metadata(part) if _stored_kind(part, name, handlers) == "pytree" else None


def item_handlers(ckpt: Checkpoint, handlers: Any = None) -> Any:
    """Returns the names of the handlers that can restore the items, by item, or that of the only item."""
    known = item_names(ckpt)
    if known is None:
        return _HANDLER_NAMES.get(_stored_kind(ckpt, None, handlers))
    return {name: _HANDLER_NAMES.get(_stored_kind(part_of(ckpt, name), name, handlers)) for name in known}


def _stored_kind(part: Checkpoint, name: str | None, handlers: Any) -> str:
    """Returns "own", "json" or "pytree" for an item.

    In Orbax's own files, the item of several that has no arrays counts as JSON.
    """
    if is_files(part):
        return "own"
    handler = handler_of(name, None, handlers)
    if handler is not None:
        return "json" if handler_kind(handler) == "json" else "pytree"
    if part.format != "orbax":
        return "json" if _class_of(part) == JSON_ITEM else "pytree"
    return "json" if name is not None and not any(arrays_of(part._source)) else "pytree"


def format_options(write: str | None, *, several: bool) -> dict[str, Any]:
    """Returns the arguments of `treering.save` that choose the format.

    write: "treering" or "orbax"; by default what the environment variable `TREERING_ORBAX_WRITE` says, or "treering".
    several: True if the root of the tree has the items as children.

    Raises `MismatchError` for another format.
    """
    chosen = write or os.environ.get("TREERING_ORBAX_WRITE") or "treering"
    if chosen not in ("treering", "orbax"):
        raise MismatchError(f"write={chosen!r}: expected 'treering' or 'orbax'")
    # Named, because programs give the directories of Orbax any names, such as `config.json`.
    return {"format": "orbax", "composite": several} if chosen == "orbax" else {"format": "treering"}


def save_tree(args: Any, handler: Any = None) -> Any:
    """Returns the tree of one item.

    Raises `MismatchError` for arguments without an item, or that do not belong to the handler, and the errors of the
    program's own handler.
    """
    kind, own = resolve(args, handler)
    if isinstance(args, nodes.CallArgs) or kind == "own":
        return nodes.save_files(own, args)
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


def save_items(args: Mapping[str, Any], handlers: Any = None) -> nodes.ItemsTree:
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
