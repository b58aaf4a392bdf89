"""Restores a tree as arguments of Orbax ask, by a template for `treering.restore`.

For each leaf of a checkpoint it decides what the template must have.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np

from .._core import dtypes
from .._core import skeleton as _skeleton
from .._core.entries import ArrayEntry, Entry, ValueEntry
from .._core.leaf_paths import join_names, key_text, split
from .._core.skeleton import Node
from .._core.source import Source
from .._pytree import flax, variable_levels, walk
from .._pytree.placements import PlacementError, resolve_placement
from .._restore.array_placement import ambient_mesh
from .._restore.checkpoint import Checkpoint
from .._restore.read_groups import as_key
from ..errors import MismatchError
from .errors import LeafNotFoundError, UnsupportedValueError

_log = logging.getLogger("treering")
_SCALARS = (bool, int, float, complex)
_TYPES = {"jax.Array": jax.Array, "np.ndarray": np.ndarray, "string": str}  # as the files of Orbax name them


class LeafTemplate(NamedTuple):
    """A leaf of a template for `treering.restore`, and a function that makes the result from the restored leaf."""

    leaf: Any
    finish: Callable[[Any], Any] | None = None


def host_template(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Returns a NumPy array that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def is_resized(entry: Entry, shape: Any) -> TypeGuard[ArrayEntry]:
    """Returns True if an array was saved with another shape."""
    return isinstance(entry, ArrayEntry) and entry.type != "key" and shape is not None and tuple(shape) != entry.shape


def resized(entry: ArrayEntry, wanted: Any, dtype: Any, place: Any, *, on_host: bool) -> LeafTemplate:
    """Returns the template of an array that gets another shape of as many axes.

    place: its sharding, None for the default device.
    """
    shape = tuple(wanted)
    if len(shape) != len(entry.shape):
        raise MismatchError(f"{entry.path}: strict=False: expected {len(entry.shape)} axes, found the shape {shape}")

    def finish(array: Any) -> Any:
        made = np.zeros(shape, array.dtype)
        kept = tuple(slice(min(sizes)) for sizes in zip(shape, array.shape, strict=True))
        made[kept] = array[kept]
        if on_host or place is None:
            return made if on_host else jax.numpy.asarray(made)
        return jax.make_array_from_callback(shape, place, lambda index: made[index])

    return LeafTemplate(
        host_template(entry.shape, dtypes.to_numpy(entry.dtype) if dtype is None else np.dtype(dtype)), finish
    )


class LeafTemplates:
    """Makes the templates of the leaves of a checkpoint.

    fallback: the place of JAX arrays whose saved place this job lacks. Without it they raise `MismatchError`.
    strict: False to truncate arrays, or pad them with zeros, to the shapes of a target.
    """

    def __init__(self, source: Source, fallback: Any = None, *, strict: bool = True):
        self._source, self._fallback, self._strict = source, fallback, strict
        # The places by the id of a record, which is kept alive. Making a mesh for each of thousands of arrays is slow.
        self._places: dict[int, tuple[Mapping[str, Any], Any]] = {}

    def as_saved(self, entry: Entry, dtype: Any = None) -> LeafTemplate:
        """Returns the template of the kind, the shape and the place that were saved."""
        if not isinstance(entry, ArrayEntry):
            value = entry.decode()
            if dtype is not None and type(value) in _SCALARS:
                return LeafTemplate(np.zeros((), dtype))
            return LeafTemplate(..., lambda _: value)
        if entry.type in ("jax", "jax-weak", "key"):
            return LeafTemplate(self._in_jax(entry, dtype, self._saved_place(entry), entry.type == "jax-weak"))
        wanted = dtypes.to_numpy(entry.dtype) if dtype is None else np.dtype(dtype)
        return LeafTemplate(wanted.type(0) if entry.type == "numpy-scalar" else host_template(entry.shape, wanted))

    def like(self, leaf: Any, entry: Entry) -> LeafTemplate:
        """Returns the template for a leaf of the program's own template, whose kind counts."""
        if leaf is None or leaf is ...:
            return _skipped(leaf)
        if type(leaf) in _SCALARS:
            return _scalar(type(leaf), entry, leaf)
        name = type(leaf).__name__
        if name == "StringMetadata":
            return LeafTemplate("")
        if name == "ScalarMetadata":
            return _scalar(type(np.dtype(leaf.dtype).type(0).item()), entry, None)
        if not self._strict and is_resized(entry, shape := getattr(leaf, "shape", None)):
            place = real_sharding(getattr(leaf, "sharding", None))
            on_host = isinstance(leaf, np.ndarray) or (place is None and entry.type in ("numpy", "numpy-scalar"))
            return resized(entry, shape, leaf.dtype, place, on_host=on_host)
        if isinstance(entry, ArrayEntry) and entry.type == "key" and getattr(leaf, "dtype", None) == np.uint32:
            place = real_sharding(getattr(leaf, "sharding", None))  # The leaf describes the data of the keys.
            return LeafTemplate(self._in_jax(entry, None, self._saved_place(entry) if place is None else place))
        if name in ("ArrayMetadata", "ShapeDtypeStruct"):
            return self._like_shape(leaf, entry)
        return LeafTemplate(leaf)

    def by_args(self, leaf: Any, entry: Entry, args: Any) -> LeafTemplate:
        """Returns the template for the `RestoreArgs` of a leaf. Only the shape of `leaf` counts."""
        if leaf is None or leaf is ...:
            return _skipped(leaf)
        if args is None:
            return _shaped(self.as_saved(entry), leaf, entry)
        kind, dtype = args.restore_type, args.dtype
        kind = _TYPES.get(kind, kind) if isinstance(kind, str) else kind
        if kind is type(...):
            return LeafTemplate(...)
        shape = getattr(args, "global_shape", None)
        if is_resized(entry, shape):
            if getattr(args, "strict", True):  # The restore will refuse this template.
                return LeafTemplate(host_template(tuple(args.global_shape), dtypes.to_numpy(entry.dtype)))
            return resized(entry, shape, dtype, _place_of(args), on_host=False)
        if kind is None:
            return _shaped(self.as_saved(entry, dtype), leaf, entry)
        if kind in (*_SCALARS, str, bytes):
            return _scalar(kind, entry, None)
        if not isinstance(kind, type) or not issubclass(kind, jax.Array | np.ndarray | np.generic):
            raise UnsupportedValueError(
                f"{entry.path}: restore_type={kind!r}: expected numpy.ndarray, jax.Array, a Python number or text"
            )
        if not issubclass(kind, jax.Array):
            saved = entry if isinstance(entry, ArrayEntry) else _array_of(entry, np.dtype)
            wanted = dtypes.to_numpy(saved.dtype) if dtype is None else np.dtype(dtype)
            return _shaped(LeafTemplate(host_template(saved.shape, wanted)), leaf, entry)
        place = _place_of(args)
        if isinstance(entry, ArrayEntry):
            place = self._saved_place(entry) if place is None else place
            if dtype is None and entry.type.startswith("numpy"):  # JAX may lack the 64 bits of NumPy.
                dtype = jax.dtypes.canonicalize_dtype(dtypes.to_numpy(entry.dtype))
        else:
            entry = _array_of(entry, jax.dtypes.canonicalize_dtype)
        return _shaped(LeafTemplate(self._in_jax(entry, dtype, place)), leaf, entry)

    def _like_shape(self, leaf: Any, entry: Entry) -> LeafTemplate:
        place = real_sharding(leaf.sharding)
        if isinstance(entry, ValueEntry) and place is None and leaf.shape == ():
            return LeafTemplate(np.zeros((), leaf.dtype))
        if place is None and isinstance(entry, ArrayEntry):
            if type(leaf).__name__ == "ArrayMetadata" or entry.type in ("numpy", "numpy-scalar"):
                return LeafTemplate(host_template(tuple(leaf.shape), np.dtype(leaf.dtype)))
            place = self._saved_place(entry)
        weak = bool(getattr(leaf, "weak_type", False))
        return LeafTemplate(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place, weak_type=weak))

    def _in_jax(self, entry: ArrayEntry, dtype: Any, place: Any, weak: bool = False) -> Any:
        if entry.type == "key":
            data = jax.ShapeDtypeStruct(entry.shape, "uint32")
            key = jax.eval_shape(lambda found: as_key(found, entry), data)
            return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=place)
        wanted = dtypes.to_numpy(entry.dtype) if dtype is None else dtype
        return jax.ShapeDtypeStruct(entry.shape, wanted, sharding=place, weak_type=weak and dtype is None)

    def _saved_place(self, entry: ArrayEntry) -> Any:
        record = self._source.sharding(entry)
        if record is None:
            return None
        if id(record) not in self._places:
            self._places[id(record)] = record, self._resolved(entry, record)
        return self._places[id(record)][1]

    def _resolved(self, entry: ArrayEntry, record: Mapping[str, Any]) -> Any:
        try:
            return resolve_placement(record, ambient_mesh(), exactly=False).sharding
        except PlacementError as error:
            if self._fallback is not None:
                return self._fallback
            raise MismatchError(
                f"{entry.path}: expected a job that has the saved place of the array, found {error}; give a target "
                "with shardings, or fallback_sharding="
            ) from None


def real_sharding(sharding: Any) -> Any:
    """Returns the sharding of JAX that a `ShardingMetadata` describes, and any other value as it is."""
    make = getattr(sharding, "to_jax_sharding", None)
    return sharding if make is None else make()


def _place_of(args: Any) -> Any:
    """Returns the sharding that `ArrayRestoreArgs` say, or None."""
    place = real_sharding(getattr(args, "sharding", None))
    if place is None and getattr(args, "mesh", None) is not None and args.mesh_axes is not None:
        return jax.sharding.NamedSharding(args.mesh, args.mesh_axes)
    return place


def _skipped(leaf: Any) -> LeafTemplate:
    """Returns the template for a leaf that the program does not want: None, or `PLACEHOLDER`."""
    return LeafTemplate(..., lambda _: leaf)


def _array_of(entry: ValueEntry, kept: Callable[[Any], Any]) -> ArrayEntry:
    """Returns the entry of the array without axes that a Python number becomes. `kept` chooses its dtype."""
    return ArrayEntry(entry.path, "numpy", np.dtype(kept(np.asarray(entry.decode()).dtype)).name, ())


def _scalar(kind: type, entry: Entry, leaf: Any) -> LeafTemplate:
    """Returns the template of a Python number or text of a type, from a number or an array without axes."""
    template = LeafTemplate(kind() if leaf is None else leaf)
    if not isinstance(entry, ArrayEntry) or entry.shape or entry.type == "key":
        return template
    found = dtypes.to_numpy(entry.dtype)
    fits = {
        bool: found.kind == "b",
        int: dtypes.is_integer(found),
        float: dtypes.is_float(found),
        complex: dtypes.is_float(found) or found.kind == "c",
    }
    if not fits.get(kind, False):
        return template
    return LeafTemplate(host_template((), found), lambda array: kind(array.item()))


def _shaped(made: LeafTemplate, leaf: Any, entry: Entry) -> LeafTemplate:
    """Returns a template with the shape that the program expects, if its leaf has one and it is another."""
    shape = getattr(leaf, "shape", None)
    if shape is None or not isinstance(entry, ArrayEntry) or entry.type == "key" or tuple(shape) == entry.shape:
        return made
    return LeafTemplate(jax.ShapeDtypeStruct(tuple(shape), dtypes.to_numpy(entry.dtype)))


def restore_as_saved(part: Checkpoint) -> Any:
    """Returns nested dicts and lists, with the kinds and the places that were saved."""
    entries = part._source.entries.values()
    if all(
        isinstance(entry, ValueEntry) for entry in entries
    ):  # JAX would sort the dicts, and those of JSON have an order.
        return _nested(part._source, [entry.decode() for entry in entries if isinstance(entry, ValueEntry)])
    leaves = LeafTemplates(part._source)
    return restore_by(part, None, lambda path, leaf, entry: leaves.as_saved(entry))


def restore_standard(part: Checkpoint, args: Any) -> Any:
    """Restores by `StandardRestore`: each leaf has the kind of its leaf in the target."""
    leaves = LeafTemplates(part._source, args.fallback_sharding, strict=args.strict)
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
    leaves = LeafTemplates(part._source)
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
    leaves = LeafTemplates(part._source)
    if restore_args is None and item is not None:
        return restore_by(part, item, lambda path, leaf, entry: leaves.like(leaf, entry))
    return restore_by(part, None, lambda path, leaf, entry: leaves.by_args(entry, entry, restore_args))


_KEEPS_MISSING = (
    "  in treering.orbax: partial_restore=True (version 1: partial_load=True), and a target with arrays in place of "
    "shapes, keeps those that the checkpoint lacks; the other arguments are those of treering.restore"
)


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
        if not missing:
            raise
        found = LeafNotFoundError(f"{error.args[0]}\n{_KEEPS_MISSING}")
        found.differences = error.differences
        raise found from None
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
