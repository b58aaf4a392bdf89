"""Builds the one source of a save, and describes the shards that the writers read of it.

The source combines the checkpoints in a tree, the rules, the casts and the levels for boxes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from .._core import dtypes, quantized, views
from .._core.boxes import Box, box_shape, full_box, slice_boxes
from .._core.entries import ArrayEntry, StatesEntry, check_readable
from .._core.json_floats import text_to_floats
from .._core.lazy import LazyArray
from .._core.leaf_paths import join_names
from .._core.rebuild import rebuild_tree
from .._core.skeleton import Node, Skeleton, containers
from .._core.source import Source
from .._core.subtree import full_source
from .._core.values import decode
from .._processes.assignment import cells_of
from .._pytree import variable_levels, walk
from .._pytree.leaves import Catalogue, Described, LocalShard, write_order_key
from .._pytree.live_tree import LiveTree
from .._restore.checkpoint import Checkpoint
from ..errors import MismatchError, UnsupportedError
from ..formats.treering.write import Info

if TYPE_CHECKING:
    from ..rules import Rule


def inline_checkpoints(flat_tree: walk.FlatTree) -> tuple[walk.FlatTree, tuple[str, ...]]:
    """Replaces the checkpoints in a flattened tree by the trees that they hold, without reading their arrays.

    Also returns the paths of the containers whose order is only inferred. Raises `UnsupportedError` for states of data
    iterators, which have a meaning only at their own path in a checkpoint.
    """
    paths: list[str] = []
    leaves: list[Any] = []
    skeleton: list[Node | int] = []
    guessed: list[str] = []
    rest = iter(flat_tree.leaves)
    for _, at, node in containers(flat_tree.skeleton):
        leaf = None if isinstance(node, Node) else next(rest)
        if not isinstance(leaf, Checkpoint):
            skeleton.append(node)
            if not isinstance(node, Node):
                paths.append(at)
                leaves.append(leaf)
            continue
        own, nodes, unsure = _in_tree_order(leaf)
        if iterators := tuple(path for path, one in own.items() if one.entry.type == "iterator"):
            raise UnsupportedError(
                f"{leaf.path}: {join_names(iterators)}: the state of a data iterator cannot be saved as a part "
                "of another "
                "tree; leave it out with treering.rules.drop"
            )
        skeleton += nodes
        paths += [f"{at}/{path}" if path else at for path in own]
        guessed += [f"{at}/{path}" if path else at for path in unsure]
        source, entries = full_source(leaf._source), leaf._source.entries
        leaves += [LazyArray(source, e) if isinstance(e := entries[path], ArrayEntry) else e for path in own]
    return walk.FlatTree(paths, leaves, skeleton, flat_tree.boxes, static=flat_tree.static), tuple(guessed)


def save_view(ckpt: Checkpoint, rules: "Sequence[Rule]", dtype: Any, info: Info) -> views.View:
    """Returns the view that a save of a checkpoint, or of a part of one, writes.

    The rules are applied, the floats are cast to `dtype` if it is given, and the view has a skeleton.
    """
    changed = ckpt.apply(rules)
    leaves, skeleton, guessed = _in_tree_order(changed)
    if codes := quantized.find_cast_codes(changed._source):
        quantized.warn_of_codes(changed.path, codes)
    if dtype is not None:
        text = dtypes.to_text(dtypes.requested_dtype(dtype))
        members = quantized.find_members(changed._source, changed._source.entries)
        quantized.warn_of_kept(changed.path, [group for group, _ in members.values()], text)
        floats = [
            path
            for path, leaf in leaves.items()
            if isinstance(leaf.entry, ArrayEntry) and dtypes.is_float(dtypes.to_numpy(leaf.entry.dtype))
            if path not in members
        ]
        leaves.update({path: views.cast(leaves[path], text) for path in floats})
    view = views.View(full_source(changed._source), leaves, skeleton)
    view.guessed = guessed
    view.step = info.step
    view.metrics = {name: decode("float", value) for name, value in info.metrics.items()}
    metadata = None if info.metadata is None else msgspec.json.decode(info.metadata)
    view.metadata = text_to_floats(metadata, info.metadata_floats)
    return view


def _in_tree_order(ckpt: Checkpoint) -> tuple[dict[str, views.Leaf], Skeleton, tuple[str, ...]]:
    """Returns the leaves of a checkpoint in the order of its tree, its skeleton, and the containers of inferred order.

    Raises `CorruptError` for leaves that are lost.
    """
    source = ckpt._source
    check_readable(source.entries.values())
    leaves = views.plain_leaves(source.entries)
    if source.skeleton is not None:
        return leaves, source.skeleton, ()
    reader = full_source(source)
    plain = views.View(reader, leaves)
    sources = {path: plain.source(path) for path in leaves}
    # A selection of leaves may leave a container without children. That container is then left out.
    all_of_it = isinstance(reader, views.View) and len(leaves) == len(reader.leaves)
    order, skeleton, guessed = rebuild_tree(sources, _own_skeleton(reader), keep_empty=all_of_it)
    return {path: leaves[path] for path in order}, skeleton, guessed


def with_box_levels(view: views.View, boxes: variable_levels.Boxes, kinds: Sequence[str]) -> views.View:
    """Adds levels to the paths of a live tree for its boxes of some kinds.

    The levels follow the contents of a box to the paths to which rules have moved them.
    """
    if not any(kind in kinds for levels in boxes.values() for kind, _ in levels):
        return view
    assert view.skeleton is not None
    moved = {path: boxes.get(source, ()) for path in view.leaves if (source := view.source(path)) != path}
    boxes = {**boxes, **moved}
    leaves = {
        (name := variable_levels.path_with_levels(path, boxes, kinds)): leaf.at(name)
        for path, leaf in view.leaves.items()
    }
    return view.changed(leaves, variable_levels.skeleton_with_levels(view.skeleton, boxes, kinds))


def _own_skeleton(reader: Source) -> Skeleton | None:
    """Returns the skeleton that a checkpoint records, below all views of it; None if it records none."""
    while isinstance(reader, views.View):
        reader = reader._reader
    return reader.skeleton


def describe_view(
    view: views.View, live: LiveTree | None, slice_bytes: int | None, piece_bytes: int | None = None
) -> Described:
    """Describes a save of all leaves of a view, whose shards are read on demand.

    An array of a live tree that is spread over devices keeps its shards if the view changes it elementwise, because
    each element is then made from the element in the same position. Arrays are cut into pieces of at most `piece_bytes`
    bytes, and pieces are read in slices of at most `slice_bytes` bytes, if these are given.
    """
    entries = list(view.entries.values())
    shardings: dict[int, Any] = {}
    spread: set[int] = set()
    shards: list[tuple[int, LocalShard]] = []
    for leaf, entry in enumerate(entries):
        if not isinstance(entry, ArrayEntry | StatesEntry):
            continue
        dtype = dtypes.to_numpy(entry.dtype)
        origin = view.source(entry.path)
        sharding = live.sharding_of(origin) if live and view.is_elementwise(entry.path) else None
        if live and sharding is not None:
            shardings[leaf] = sharding
            if live.is_global(origin):
                spread.add(leaf)
            pieces = [shard.box for shard in live.shards_of(origin)]
        else:
            pieces = [full_box(entry.shape)]
        if piece_bytes:
            pieces = cells_of(pieces, dtype.itemsize, piece_bytes)
        for piece in pieces:
            order = write_order_key(math.prod(box_shape(piece)) * dtype.itemsize)
            for part in _slices_of(piece, dtype.itemsize, slice_bytes) if slice_bytes else (piece,):
                nbytes = math.prod(box_shape(part)) * dtype.itemsize
                shards.append((order, LocalShard(leaf, part, dtype, nbytes, True, piece)))
    shards.sort(key=lambda one: one[0])
    places = [_place(view, live, entry) if isinstance(entry, ArrayEntry) else None for entry in entries]
    catalogue = Catalogue(entries, {}, shardings, spread, places, view.static)
    return Described(catalogue, tuple(shard for _, shard in shards), [None] * len(shards))


def _place(view: views.View, live: LiveTree | None, entry: ArrayEntry) -> Mapping[str, Any] | None:
    """Returns the recorded placement of an array, with `cast` set if the save changes its dtype."""
    place = view.sharding(entry)
    origin = live.entries.get(view.source(entry.path)) if live else None
    if not isinstance(origin, ArrayEntry) or origin.dtype == entry.dtype or not view.is_elementwise(entry.path):
        return place
    return {**(place or {}), "cast": True}


def _slices_of(box: Box, itemsize: int, nbytes: int) -> Iterator[Box]:
    """Yields the slices of a box, each of about `nbytes` bytes at most, in order."""
    for part in slice_boxes(box_shape(box), itemsize, nbytes):
        yield tuple((first + start, first + stop) for (first, _), (start, stop) in zip(box, part, strict=True))


def cross_process_paths(view: views.View, live: LiveTree) -> tuple[str, ...]:
    """Returns the arrays of a view that no process can make from its own part of a live tree."""
    arrays = (path for path, leaf in view.leaves.items() if isinstance(leaf.entry, ArrayEntry))
    made = (path for path in arrays if not view.is_elementwise(path))
    return tuple(path for path in made if any(live.is_global(entry.path) for entry, _ in view.origins(path)))


def agree_can_write(messages: Sequence[Any]) -> bool:
    """Returns True if all processes can write their parts. Raises `MismatchError` if their rules differ."""
    for process, (_, sources) in enumerate(messages):
        if sources != messages[0][1]:
            raise MismatchError(
                f"expected the same rules in every process: the rules of process {process} make some leaf from a "
                "different leaf than the rules of process 0; nothing was written"
            )
    return all(can for can, _ in messages)
