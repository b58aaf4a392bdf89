"""Describes the tree of a save: its leaves, and the parts of its arrays that this process holds."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .._core.boxes import box_shape
from .._core.skeleton import Skeleton
from .._core.views import View
from .._processes import coordinator
from .._pytree import box_levels, flax, structures, walk
from .._pytree.leaves import Described
from .._pytree.live_tree import LiveTree
from .._restore.checkpoint import Checkpoint
from .._threads.python_gc import gc_paused
from ..errors import UnsupportedError
from ..formats import Format
from . import inputs
from .target import Target


class Unchanged(NamedTuple):
    """A live tree whose arrays are saved unchanged in the native format."""

    skeleton: Skeleton
    described: Described


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


def describe(target: Target, tree: Any) -> Contents:
    """Describes a tree or a checkpoint. Raises `UnsupportedError` for leaves that cannot be saved."""
    options, call, format = target.options, target.call, target.format
    if isinstance(tree, Checkpoint):
        return Changed(inputs.view_of(tree, options.rules, options.dtype, target.info))
    with gc_paused():
        walked = _walk(tree, format)
        guessed: tuple[str, ...] = ()
        if Checkpoint in set(map(type, walked.leaves)):
            walked, guessed = inputs.grafted(walked)
        described = structures.described(
            walked.paths,
            walked.leaves,
            dtype=None if options.rules else options.dtype,  # with rules, `view_of` casts what they make
            detach=options.background,
            alone=not coordinator.several(),
            together=call.count > 1,
        )
        if walked.static:
            described = described._replace(catalogue=described.catalogue._replace(static=walked.static))
        if call.count == 1:
            _check_whole(described)
    if format.name == "treering" and not options.rules:
        return Unchanged(walked.skeleton, described)
    live = LiveTree(target.path, walked.skeleton, described)
    change = functools.partial(_changed, target, walked.boxes, guessed)
    return Changed(change(Checkpoint(live)), live, change)


def _walk(tree: Any, format: Format) -> walk.Walk:
    return walk.walk(flax.plain(tree)) if "variable" in format.boxes else walk.walk_split(flax.split(tree))


def _changed(target: Target, boxes: box_levels.Boxes, guessed: tuple[str, ...], ckpt: Checkpoint) -> View:
    """Returns the view to write, of a live tree or of the temporary checkpoint that it was saved as."""
    view = inputs.view_of(ckpt, target.options.rules, target.options.dtype, target.info)
    view = inputs.with_boxes(view, boxes, target.format.boxes)
    view.guessed += guessed
    return view


def _check_whole(described: Described) -> None:
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
