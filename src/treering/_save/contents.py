"""What is saved when that is a checkpoint, and what writers of other formats get to see of a live tree."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from .._core import dtypes, views
from .._core.boxes import Box, extent, intersect, slices
from .._core.entries import ArrayEntry, Entry, check_whole
from .._core.lazy import LazyArray
from .._core.paths import few
from .._core.rebuilt import rebuilt
from .._core.skeleton import Node, Skeleton, containers
from .._core.source import Problem, Reader
from .._core.values import decode
from .._processes.assignment import alignment
from .._pytree import box_levels, walk
from .._pytree.leaves import Content, Source, lazy_sources
from .._pytree.live_tree import Feed
from .._restore.checkpoint import Checkpoint
from ..errors import UnsupportedError
from ..formats.treering.write import Info

if TYPE_CHECKING:
    from ..rules import Rule


def grafted(walked: walk.Walk) -> tuple[walk.Walk, tuple[str, ...]]:
    """A flattened tree with the trees of the checkpoints in it in their places; their arrays are not read.

    Returns the containers, too, of which the order is only inferred. Raises `UnsupportedError` for what only its own
    place in a checkpoint gives a meaning.
    """
    paths: list[str] = []
    leaves: list[Any] = []
    skeleton: list[Node | int] = []
    guessed: list[str] = []
    rest = iter(walked.leaves)
    for _, at, node in containers(walked.skeleton):
        leaf = None if isinstance(node, Node) else next(rest)
        if not isinstance(leaf, Checkpoint):
            skeleton.append(node)
            if not isinstance(node, Node):
                paths.append(at)
                leaves.append(leaf)
            continue
        own, nodes, unsure = _arranged(leaf)
        if iterators := tuple(path for path, one in own.items() if one.entry.type == "iterator"):
            raise UnsupportedError(
                f"{leaf.path}: {few(iterators)}: the state of a data iterator cannot be saved as a part of another "
                "tree; leave it out with treering.rules.drop"
            )
        skeleton += nodes
        paths += [f"{at}/{path}" if path else at for path in own]
        guessed += [f"{at}/{path}" if path else at for path in unsure]
        entries = leaf._entries
        leaves += [LazyArray(leaf._reader, e) if isinstance(e := entries[path], ArrayEntry) else e for path in own]
    return walk.Walk(paths, leaves, skeleton, walked.boxes), tuple(guessed)


def prepared(ckpt: Checkpoint, rules: "Sequence[Rule]", dtype: Any, info: Info) -> views.View:
    """A checkpoint, or a part of one, as it is to be saved: changed by rules, floats cast, with a tree around it."""
    changed = ckpt.apply(rules)
    leaves, skeleton, guessed = _arranged(changed)
    if dtype is not None:
        text = dtypes.to_text(dtypes.asked(dtype))
        floats = [
            path
            for path, leaf in leaves.items()
            if isinstance(leaf.entry, ArrayEntry) and dtypes.is_float(dtypes.to_numpy(leaf.entry.dtype))
        ]
        leaves.update({path: views.cast(leaves[path], text) for path in floats})
    view = views.View(changed._reader, leaves, skeleton)
    view.guessed = guessed
    view.step = info.step
    view.metrics = {name: decode("float", value) for name, value in info.metrics.items()}
    view.metadata = None if info.metadata is None else msgspec.json.decode(info.metadata)
    return view


def _arranged(ckpt: Checkpoint) -> tuple[dict[str, views.Leaf], Skeleton, tuple[str, ...]]:
    """The leaves of a checkpoint in the order of its tree, its skeleton, and containers in an order that is inferred.

    Raises `CorruptError` for leaves that are lost.
    """
    check_whole(ckpt._entries.values())
    leaves = views.leaves_of(ckpt._entries)
    if ckpt._skeleton is not None:
        return leaves, ckpt._skeleton, ()
    reader = ckpt._reader
    plain = views.View(reader, leaves)
    sources = {path: plain.source(path) for path in leaves}
    all_of_it = isinstance(reader, views.View) and len(leaves) == len(reader.leaves)  # and no selection
    order, skeleton, guessed = rebuilt(sources, _own_skeleton(reader), keep_empty=all_of_it)
    return {path: leaves[path] for path in order}, skeleton, guessed


def with_boxes(view: views.View, boxes: box_levels.Boxes, kinds: Sequence[str]) -> views.View:
    """A live tree with levels for its boxes of some kinds, wherever rules have moved what is in them."""
    if not any(kind in kinds for levels in boxes.values() for kind, _ in levels):
        return view
    assert view.skeleton is not None
    moved = {path: boxes.get(source, ()) for path in view.leaves if (source := view.source(path)) != path}
    boxes = {**boxes, **moved}
    leaves = {(name := box_levels.shown(path, boxes, kinds)): leaf.at(name) for path, leaf in view.leaves.items()}
    return view.changed(leaves, box_levels.shown_skeleton(view.skeleton, boxes, kinds))


def _own_skeleton(reader: Reader) -> Skeleton | None:
    """The tree that a checkpoint records, whatever view of it there is."""
    while isinstance(reader, views.View):
        reader = reader._reader
    return reader.skeleton


def of_reader(reader: Reader) -> Content:
    """The content of a save of all leaves of a reader, in slices, in the order in which they are written."""
    content = Content(list(reader.entries.values()), {}, {}, set(), [])
    sources: list[tuple[int, Source]] = []
    for leaf, entry in enumerate(content.entries):
        if isinstance(entry, ArrayEntry):
            dtype = dtypes.to_numpy(entry.dtype)
            order = alignment(math.prod(entry.shape) * dtype.itemsize)
            sources += [(order, source) for source in lazy_sources(leaf, LazyArray(reader, entry), dtype)]
    sources.sort(key=lambda one: one[0])
    content.sources.extend(source for _, source in sources)
    return content


class Fed:
    """A live tree that is being saved, as `treering.formats.Reader`: what writers of other formats are given."""

    format = "live"
    nbytes, step, metadata, created = 0, None, None, None
    positional = False
    numbers_are_arrays = False
    untold: frozenset[str] = frozenset()
    identity = ""

    def __init__(self, path: str, skeleton: Skeleton, content: Content, feed: Feed):
        self.path, self.skeleton, self.metrics = path, skeleton, dict[str, float]()
        self.entries: dict[str, Entry] = {entry.path: entry for entry in content.entries}
        self._feed = feed
        self._leaf = {entry.path: content.tied.get(n, n) for n, entry in enumerate(content.entries)}
        self._sources: dict[int, list[int]] = {}
        for n, source in enumerate(feed.sources):
            self._sources.setdefault(source.leaf, []).append(n)

    def check_present(self) -> None: ...

    def sharding(self, entry: ArrayEntry) -> dict[str, Any] | None:
        return None

    def maps(self, wish: bool | None) -> bool:
        return True

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, map: bool | None = None
    ) -> list[np.ndarray]:
        return [self._read(entry, box) for entry, box in wanted]

    def problems(self) -> Iterator[Problem]:
        return iter(())

    def _read(self, entry: ArrayEntry, box: Box) -> np.ndarray:
        dtype = dtypes.to_numpy(entry.dtype)
        out = np.empty(extent(box), dtype)
        for n in self._sources[self._leaf[entry.path]]:
            source = self._feed.sources[n]
            common = intersect(source.box, box) if box else ()
            if common is not None and out.size:
                array = self._feed.take(n).view(dtype).reshape(extent(source.box))
                if common == box == source.box:
                    return array
                out[slices(common, box)] = array[slices(common, source.box)]
        return out
