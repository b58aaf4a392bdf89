"""Describes the tree of a save: its leaves, and the parts of its arrays that this process holds."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .._core.boxes import box_shape
from .._core.skeleton import Skeleton
from .._core.views import View
from .._processes import coordinator
from .._pytree import flax, tree_cache, variable_levels, walk
from .._pytree.leaves import Described
from .._pytree.live_tree import LiveTree
from .._restore.checkpoint import Checkpoint
from .._threads.python_gc import gc_paused
from ..errors import UnsupportedError
from ..formats import Format
from ..formats.treering.shared_files import Reuse
from . import save_source
from .save_target import SaveTarget


class Unchanged(NamedTuple):
    """A live tree whose arrays are saved unchanged in the native format.

    leaves: the leaves of the tree.
    reuse: finds the arrays that earlier steps have.
    """

    skeleton: Skeleton
    described: Described
    leaves: Sequence[Any] = ()
    reuse: Reuse | None = None


class Changed(NamedTuple):
    """A checkpoint, or a live tree that the rules or the format change.

    view: the leaves as Treering will write them.
    live: the live tree; None for a checkpoint.
    change: makes the same view of any source that has the same leaves as the live tree.
    """

    view: View
    live: LiveTree | None = None
    change: Callable[[Checkpoint], View] | None = None

    @property
    def described(self) -> Described | None:
        """The live tree before the change; None for a checkpoint."""
        return self.live.described if self.live else None


Contents = Unchanged | Changed


def describe(target: SaveTarget, tree: Any) -> Contents:
    """Describes a tree or a checkpoint. Raises `UnsupportedError` for leaves that cannot be saved."""
    options, call, format = target.options, target.call, target.format
    if isinstance(tree, Checkpoint):
        return Changed(save_source.save_view(tree, options.rules, options.dtype, target.info))
    with gc_paused():
        flat_tree = _flatten_tree(tree, format)
        guessed: tuple[str, ...] = ()
        if Checkpoint in set(map(type, flat_tree.leaves)):
            flat_tree, guessed = save_source.inline_checkpoints(flat_tree)
        described = tree_cache.describe_cached(
            flat_tree.paths,
            flat_tree.leaves,
            dtype=None if options.rules else options.dtype,  # with rules, the view casts what they make
            detach=options.background,
            single_process=not coordinator.is_multi_process(),
            collective=call.count > 1,
        )
        if flat_tree.static:
            described = described._replace(catalogue=described.catalogue._replace(static=flat_tree.static))
        if call.count == 1:
            _check_complete(described)
    if format.name == "treering" and not options.rules:
        return Unchanged(flat_tree.skeleton, described, flat_tree.leaves)
    live = LiveTree(target.path, flat_tree.skeleton, described)
    change = functools.partial(_view_to_write, target, flat_tree.boxes, guessed)
    return Changed(change(Checkpoint(live)), live, change)


def _flatten_tree(tree: Any, format: Format) -> walk.FlatTree:
    return (
        walk.flatten_tree(flax.unbox_graph_modules(tree))
        if "variable" in format.boxes
        else walk.flatten_split(flax.split(tree))
    )


def _view_to_write(
    target: SaveTarget, boxes: variable_levels.Boxes, guessed: tuple[str, ...], ckpt: Checkpoint
) -> View:
    """Returns the view to write, of a live tree or of the temporary checkpoint that it was saved as."""
    view = save_source.save_view(ckpt, target.options.rules, target.options.dtype, target.info)
    view = save_source.with_box_levels(view, boxes, target.format.boxes)
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
