"""Describes what a save writes: its leaves, and the parts of its arrays that this process holds."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from .._core import dtypes, quantized, views
from .._core.boxes import box_shape
from .._core.entries import ArrayEntry, Entry, check_readable
from .._core.lazy import LazyArray
from .._core.leaf_paths import join_names
from .._core.skeleton import Node, Skeleton, containers, rebuild_tree
from .._core.source import Source, flax_boxes, full_source
from .._core.values import decode, text_to_floats
from .._core.views import View
from .._processes import coordinator
from .._processes.assignment import Assignment
from .._pytree import flax, live_tree, variable_levels, walk
from .._pytree.lazy_supply import ShardSupply
from .._pytree.leaves import Catalogue, Described
from .._pytree.live_tree import LiveTree
from .._restore.checkpoint import Checkpoint
from .._threads.python_gc import gc_paused
from ..errors import UnsupportedError
from ..formats.treering.manifest_fields import Base, Delta
from .save_reuse import SaveReuse
from .target import Info, SaveTarget

if TYPE_CHECKING:
    from ..rules import Rule


_OWN = "_pytree__state"  # NNX's name of the child of an object that is for NNX alone


class OwnParts(NamedTuple):
    """What a process of several writes of the arrays, each part with an entry of its own.

    entries: those of the leaves, and then those of the parts.
    shares: the parts, by their numbers in `entries`; this process writes all.
    leaves: for each part, the number of the leaf, and that of its box in the leaf's assignment.
    """

    entries: Sequence[Entry]
    shares: Mapping[int, Assignment]
    leaves: Mapping[int, tuple[int, int]]


class Encoded(NamedTuple):
    """What a save writes instead of its arrays.

    catalogue, shares, supply: as in `plan.NativePlan`.
    base: the checkpoint that the differences refer to; None without any.
    differences: for each difference, by the number of its entry: the array, and how it is stored.
    own: the parts of this process, if several write.
    """

    catalogue: Catalogue
    shares: Mapping[int, Assignment] | None
    supply: ShardSupply
    base: Base | None = None
    differences: Mapping[int, tuple[Entry, Delta]] = {}
    own: OwnParts | None = None


class Deltas(Protocol):
    """What a save stores as differences to another checkpoint; see `_publish.encoder`.

    begun: when the save began, by `time.perf_counter`.
    """

    begun: float

    def encode(
        self, target: Any, catalogue: Catalogue, shares: Mapping[int, Assignment] | None, supply: ShardSupply
    ) -> Encoded:
        """Returns what to write. Called in the background thread, before anything is written.

        target: the `NativeTarget`. shares: those of all processes; see `plan.NativePlan`.
        """
        ...

    def committed(self, identity: str, is_complete: bool) -> None:
        """Notes that the save is committed.

        identity: that of the checkpoint. is_complete: False in process 0 if the checkpoint has differences.
        """
        ...


class PlainTree(NamedTuple):
    """A live tree whose arrays are saved as they are.

    leaves: the leaves of the tree.
    reuse: finds the arrays that earlier steps have.
    deltas: stores arrays as differences to another checkpoint.
    """

    skeleton: Skeleton
    described: Described
    leaves: Sequence[Any] = ()
    reuse: SaveReuse | None = None
    deltas: Deltas | None = None


class TreeView(NamedTuple):
    """A checkpoint, or a live tree that the rules or the format change.

    view: the leaves as Treering will write them.
    live: the live tree; None for a checkpoint.
    change: makes the same view of any source that has the same leaves as the live tree.
    deltas: as in `PlainTree`.
    """

    view: View
    live: LiveTree | None = None
    change: Callable[[Checkpoint], View] | None = None
    deltas: Deltas | None = None

    @property
    def described(self) -> Described | None:
        """The live tree before the change; None for a checkpoint."""
        return self.live.described if self.live else None


SavedTree = PlainTree | TreeView


def describe(target: SaveTarget, tree: Any) -> SavedTree:
    """Describes a tree or a checkpoint. Raises `UnsupportedError` for leaves that cannot be saved."""
    options, call, format = target.options, target.call, target.format
    if isinstance(tree, Checkpoint):
        view = save_view(tree, options.rules, options.dtype, target.info)
        return TreeView(with_box_levels(view, format.boxes))
    with gc_paused():
        flat_tree = _flatten_for_levels(tree) if "variable" in format.boxes else walk.flatten_split(flax.split(tree))
        guessed: tuple[str, ...] = ()
        if Checkpoint in set(map(type, flat_tree.leaves)):
            flat_tree, guessed = inline_checkpoints(flat_tree)
        described = live_tree.describe_cached(
            flat_tree.paths,
            flat_tree.leaves,
            dtype=None if options.rules else options.dtype,  # with rules, the view casts what they make
            detach=options.background,
            single_process=not coordinator.is_multi_process(),
            collective=call.count > 1,
        )
        if flat_tree.static or flat_tree.boxes:
            catalogue = described.catalogue._replace(static=flat_tree.static, boxes=flat_tree.boxes)
            described = described._replace(catalogue=catalogue)
        if call.count == 1 and described.catalogue.global_leaves:
            _check_complete(described)
        if target.writes_live_trees and not options.rules:
            return PlainTree(flat_tree.skeleton, described, flat_tree.leaves)
        live = LiveTree(target.path, flat_tree.skeleton, described)
        change = functools.partial(_view_to_write, target, guessed)
        return TreeView(change(Checkpoint(live)), live, change)


def _flatten_for_levels(tree: Any) -> walk.FlatTree:
    """Flattens a tree as Orbax does, with the entries of NNX objects that hold nothing, unless it has an `nnx.List`.

    Orbax cannot restore into a tree with such a list, only into the states of its objects, which lack these entries.
    """
    flat_tree = walk.flatten_tree(flax.unbox_graph_modules(tree))
    objects = [node.names() for node in flat_tree.skeleton if isinstance(node, Node) and _OWN in node.names()]
    has_list = any(int in map(type, names) for names in objects)
    return walk.flatten_tree(flax.unshare(tree, objects=True)) if has_list else flat_tree


def _view_to_write(target: SaveTarget, guessed: tuple[str, ...], ckpt: Checkpoint) -> View:
    """Returns the view to write, of a live tree or of the temporary checkpoint that it was saved as."""
    view = save_view(ckpt, target.options.rules, target.options.dtype, target.info)
    view = with_box_levels(view, target.format.boxes)
    view.guessed += guessed
    return view


def _check_complete(described: Described) -> None:
    """Raises `UnsupportedError` if this process saves alone and holds only a part of some array."""
    catalogue, shards, _ = described
    missing: list[str] = []
    for leaf in sorted(catalogue.global_leaves):
        entry: Any = catalogue.entries[leaf]
        here = sum(math.prod(box_shape(shard.box)) for shard in shards if shard.leaf == leaf)
        if here < math.prod(entry.shape):
            missing.append(f"  {entry.path or '(root)'}: this process has {here} of {math.prod(entry.shape)} elements")
    if missing:
        raise UnsupportedError("\n".join(["processes='this' saves complete arrays; nothing was written:", *missing]))


def inline_checkpoints(flat_tree: walk.FlatTree) -> tuple[walk.FlatTree, tuple[str, ...]]:
    """Replaces the checkpoints in a flattened tree by the trees that they hold, without reading their arrays.

    Also returns the paths of the containers whose order is only inferred. Raises `UnsupportedError` for states of data
    iterators, which have a meaning only at their own path in a checkpoint.
    """
    paths: list[str] = []
    leaves: list[Any] = []
    skeleton: list[Node | int] = []
    guessed: list[str] = []
    boxes = dict(flat_tree.boxes)
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
        inside = views.moved_boxes(flax_boxes(source), {path: one.source for path, one in own.items()})
        boxes.update({f"{at}/{path}" if path else at: levels for path, levels in inside.items()})
        leaves += [LazyArray(source, e) if isinstance(e := entries[path], ArrayEntry) else e for path in own]
    return walk.FlatTree(paths, leaves, skeleton, boxes, static=flat_tree.static), tuple(guessed)


def save_view(ckpt: Checkpoint, rules: "Sequence[Rule]", dtype: Any, info: Info) -> views.View:
    """Returns the view that a save of a checkpoint, or of a part of one, writes.

    The rules are applied, the floats are cast to `dtype` if it is given, and the view has a skeleton.
    """
    # No rules would make a view of all leaves, which `View` does below. Only a tree without a record needs the call.
    changed = ckpt.apply(rules) if rules or ckpt._source.skeleton is None else ckpt
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


def with_box_levels(view: views.View, kinds: Sequence[str]) -> views.View:
    """Adds levels to the paths of a view for its boxes of some kinds."""
    boxes = view.flax_boxes
    if not any(kind in kinds for levels in boxes.values() for kind, _ in levels):
        return view
    assert view.skeleton is not None
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
