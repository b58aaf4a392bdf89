"""Restores items of a checkpoint by arguments, and describes them."""

import os
from collections.abc import Mapping
from typing import Any

from .._core import source as _source
from .._core.leaf_paths import join_names, key_text
from .._core.skeleton import Node
from .._core.source import HANDLER_FILES, JSON_ITEM, arrays_of, check_not_left_out, is_left_out
from .._restore.checkpoint import Checkpoint
from ..errors import MismatchError, NotFoundError
from . import handler_files, metadata, registration, tree_restore
from .arguments import Composite
from .errors import ItemNotFoundError
from .kinds import handler_kind, handler_of, handlers_in, resolve

DEFAULT_ITEM = "default"  # Orbax's name of an only item that the program does not name
_LEAF_NAME = "checkpoint"  # Orbax's name of an item that is a number
KEY_NAME, KEY_METADATA = "np_random_key", "np_random_key_metadata"  # as Orbax names the two parts of such an item
_HANDLER_NAMES = {
    kind: f"treering.orbax.handlers.{name}CheckpointHandler" for kind, name in (("json", "Json"), ("pytree", "PyTree"))
}


def item_names(ckpt: Checkpoint) -> tuple[str, ...] | None:
    """Returns the names of the items of a checkpoint, None if it is one tree."""
    return _source.item_names(ckpt._source)


def restore_item(ckpt: Checkpoint, name: str | None, args: Any = None, handler: Any = None) -> Any:
    """Restores an item. The name None stands for the entire checkpoint.

    Raises `ItemNotFoundError`, which is a `KeyError`, if there is no such item, and `MismatchError` if the item does
    not fit the arguments.
    """
    kind, own = resolve(args, handler)
    if isinstance(args, handler_files.CallArgs) or kind == "own":
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
        return handler_files.restore_directory(handler_files.path_object(directory), handler, args)
    part = part_of(ckpt, name)
    if not is_files(part):
        raise MismatchError(
            f"{ckpt.path}: {name or 'the checkpoint'} was not saved by a handler of its own; restore it with the "
            f"arguments that it was saved with, not by {type(handler).__name__}"
        )
    return handler_files.restore_files(part.restore(), handler, args)


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
