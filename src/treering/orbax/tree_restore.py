"""Restores a tree as arguments of Orbax ask, by a template for `treering.restore`."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._core import skeleton as _skeleton
from .._core.entries import Entry, ValueEntry
from .._core.leaf_paths import join_names, key_text, split
from .._core.skeleton import Node
from .._core.source import Source
from .._pytree import flax, variable_levels, walk
from .._restore.checkpoint import Checkpoint
from ..errors import MismatchError
from .errors import LeafNotFoundError, UnsupportedValueError
from .leaf_templates import LeafTemplate, Leaves

_log = logging.getLogger("treering")


def restore_as_saved(part: Checkpoint) -> Any:
    """Returns nested dicts and lists, with the kinds and the places that were saved."""
    entries = part._source.entries.values()
    if all(
        isinstance(entry, ValueEntry) for entry in entries
    ):  # JAX would sort the dicts, and those of JSON have an order.
        return _nested(part._source, [entry.decode() for entry in entries if isinstance(entry, ValueEntry)])
    leaves = Leaves(part._source)
    return restore_by(part, None, lambda path, leaf, entry: leaves.as_saved(entry))


def restore_standard(part: Checkpoint, args: Any) -> Any:
    """Restores by `StandardRestore`: each leaf has the kind of its leaf in the target."""
    leaves = Leaves(part._source, args.fallback_sharding, strict=args.strict)
    if args.item is None:
        return restore_by(part, None, lambda path, leaf, entry: leaves.as_saved(entry))
    return restore_by(part, args.item, lambda path, leaf, entry: leaves.like(leaf, entry))


def restore_pytree(part: Checkpoint, args: Any) -> Any:
    """Restores by `PyTreeRestore`: each leaf has the kind that was saved, or that its `RestoreArgs` say."""
    if args.transforms or getattr(args, "legacy_transform_fn", None) is not None:
        raise UnsupportedValueError("transforms: not supported; use rules= of treering.restore")
    if args.transforms is not None and not args.transforms_default_to_original:
        raise UnsupportedValueError("transforms_default_to_original=False: not supported")
    if args.transforms is not None and args.item is None:
        raise MismatchError("transforms: expected an item that says the structure of the result, found None")
    leaves = Leaves(part._source)
    given = _args_by_path(args.restore_args)

    def template(path: str, leaf: Any, entry: Entry) -> LeafTemplate:
        return leaves.by_args(leaf, entry, given.get(path))

    partial = bool(getattr(args, "partial_restore", False)) or args.transforms is not None

    known = {path for _, path, _ in _skeleton.containers(part._source.skeleton or ())}
    if args.item is not None:
        known |= {path for _, path, _ in _skeleton.containers(walk.flatten_tree(args.item).skeleton)}
    # Options of a container are those of a leaf that another tree has there, such as a masked one.
    if (rest := tuple(path for path in given if path not in known)) and not partial:
        raise MismatchError(f"restore_args: expected the structure of the tree, found also {join_names(rest)}")
    return restore_by(part, args.item, template, partial=partial)


def restore_leaf(part: Checkpoint, item: Any, restore_args: Any) -> Any:
    """Restores a checkpoint that is one leaf: an array, a number or a key."""
    leaves = Leaves(part._source)
    if restore_args is None and item is not None:
        return restore_by(part, item, lambda path, leaf, entry: leaves.like(leaf, entry))
    return restore_by(part, None, lambda path, leaf, entry: leaves.by_args(entry, entry, restore_args))


def restore_by(
    part: Checkpoint,
    item: Any,
    template: Callable[[str, Any, Entry], LeafTemplate],
    *,
    partial: bool = False,
) -> Any:
    """Returns the tree, with the structure of `item` or, without one, that was saved.

    template: makes the template of a leaf of `item` (or of an entry) and the entry at its path.
    partial: leaves out what `item` lacks, and takes from it the arrays that the checkpoint lacks, which is logged.
        Orbax 0.12.8 does the same, but also returns a `jax.ShapeDtypeStruct` in place of an array.

    Raises `LeafNotFoundError`, which is a `MismatchError`, if the checkpoint lacks a leaf of `item`.
    """
    source = part._source
    item = structure_of(source) if item is None else flax.unshare(item, objects=False)
    flat = walk.flatten_tree(item)
    entries = variable_levels.rename_to_tree(flat, source.entries)
    made = [
        template(path, leaf, entries[path]) if path in entries else LeafTemplate(leaf)
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
    ]
    like = walk.unflatten(item, [one.leaf for one in made], flat.structure)
    missing = tuple(path for path in flat.paths if path not in entries)
    try:
        tree = part.restore(
            like, missing="template" if partial else "error", extra="ignore" if partial else "error", dtype="template"
        )
    except MismatchError as error:
        raise (LeafNotFoundError(*error.args) if missing else error) from None
    if missing:
        _log.warning(
            "%s: leaves that the checkpoint lacks stay as they are in the target: %s", part.path, join_names(missing)
        )
    if not any(one.finish for one in made):
        return tree
    done = walk.flatten_tree(tree)
    leaves = [one.finish(leaf) if one.finish else leaf for one, leaf in zip(made, done.leaves, strict=True)]
    return walk.unflatten(tree, leaves, done.structure)


def structure_of(source: Source) -> Any:
    """Returns the saved tree as Orbax does, with entries as leaves.

    It has nested dicts with text for keys, and lists. Only an empty tuple stays one, and an empty container of another
    kind, such as the state of an optimizer without any, is None.
    """
    entries = list(source.entries.values())
    if source.skeleton is None:
        return _skeleton.nest_by_path(source.entries, entries)
    nodes, leaves = none_for_empty(source.skeleton, entries)
    return _skeleton.build([_plain(node) if isinstance(node, Node) else node for node in nodes], leaves)


def none_for_empty(skeleton: Sequence[Node | int], leaves: Iterable[Any]) -> tuple[list[Node | int], list[Any]]:
    """Returns a skeleton and its leaves, with the leaf None for each empty container that Orbax has no kind for."""
    rest = iter(leaves)
    nodes: list[Node | int] = []
    found: list[Any] = []
    for node in skeleton:
        is_kept = isinstance(node, Node) and (node.count() or node.kind in ("dict", "list", "tuple"))
        nodes.append(node if is_kept else _skeleton.LEAF)
        if not is_kept:
            found.append(None if isinstance(node, Node) else next(rest))
    return nodes, found


def _nested(source: Source, leaves: Sequence[Any]) -> Any:
    if source.skeleton is None:
        return _skeleton.nest_by_path(source.entries, leaves)
    return _skeleton.build([_plain(node) if isinstance(node, Node) else node for node in source.skeleton], leaves)


def _plain(node: Node) -> Node:
    if isinstance(node.keys, int):
        return node if node.keys == 0 else Node("list", "", node.keys)
    return Node("dict", "", [split(key_text(key))[0] for key in node.children()])


def _args_by_path(restore_args: Any) -> dict[str, Any]:
    """Returns the `RestoreArgs` in a tree, by path."""
    if restore_args is None:
        return {}
    flat = walk.flatten_tree(restore_args)
    known = {path: one for path, one in zip(flat.paths, flat.leaves, strict=True) if one is not None and one is not ...}
    if wrong := [path for path, one in known.items() if not hasattr(one, "restore_type")]:
        kind = type(known[wrong[0]]).__name__
        raise MismatchError(f"restore_args: {wrong[0] or '(root)'}: expected RestoreArgs, found {kind}")
    return known
