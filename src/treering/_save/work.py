"""What a save has to write, and how it gets there: of a live tree or of a checkpoint, as it is or changed by rules."""

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .. import formats, stores
from .._core.boxes import extent
from .._core.entries import ArrayEntry
from .._core.source import ABOUT, Reader, Written
from .._core.views import View
from .._processes import assignment, consistency, coordinator
from .._processes import progress as _progress
from .._processes.coordinator import Call
from .._pytree import flax, leaves, walk
from .._pytree.live_tree import Feed
from .._restore.checkpoint import Checkpoint
from .._threads.gc import paused
from .._threads.pool import Crew, start
from ..errors import ExistsError, UnsupportedError
from ..formats import Format
from ..formats.treering import write as native
from ..rules import Rule
from . import contents as _contents

_log = logging.getLogger("treering")
_HELD = 256 << 20  # bytes of a checkpoint in memory while it is copied in the background


class Wish(NamedTuple):
    """How to save; see `treering.save`."""

    format: str | None
    overwrite: bool
    rules: Sequence[Rule]
    dtype: Any
    limit: int | None
    background: bool
    progress: bool
    options: Mapping[str, Any]
    given: frozenset[str] = (
        frozenset()
    )  # which of step, metrics and metadata are the caller's, not a copied checkpoint's


class Work(NamedTuple):
    """A save that is ready to begin: `hand_over` is for the caller's thread, `write` for the background."""

    feed: Feed
    hand_over: Callable[[], None]
    write: Callable[[Crew], Written]


def prepare(call: Call, place: str, tree: Any, info: native.Info, wish: Wish, format: Format) -> Work:
    """Describes the tree and finds what this process writes. Raises what `treering.save` raises before it begins."""
    copied = isinstance(tree, Checkpoint)
    direct = format.name == "treering" and not copied and not wish.rules
    if call.count > 1 and not direct:
        raise UnsupportedError(
            f"{place}: several processes together save live trees in the native format, without rules; let one process "
            "do this, with processes='this'"
        )
    if copied:
        return _from_reader(call, place, _contents.prepared(tree, wish.rules, wish.dtype, info), info, wish, format)
    with paused():
        walked = _walk(tree, format)
        guessed: tuple[str, ...] = ()
        if Checkpoint in set(map(type, walked.leaves)):
            walked, guessed = _contents.grafted(walked)
        content = leaves.collect(
            walked.paths,
            walked.leaves,
            dtype=None if wish.rules else wish.dtype,
            detach=wish.background,
            alone=not coordinator.several(),
        )
        if call.count == 1:
            _check_whole(content)
        shares = assignment.plan(content, call.count) if call.count > 1 else None
        sources = assignment.handed_over(content, shares, call.index)
        content.sources.clear()  # and not to be held while they are written
    feed = Feed(sources, wish.limit if direct else None)

    def hand_over() -> None:
        with paused() if wish.limit is None else contextlib.nullcontext():
            feed.run()

    if not direct:
        live = _contents.Fed(place, walked.skeleton, content, feed)
        ckpt = Checkpoint(live, live.entries, live.skeleton)
        view = _contents.prepared(ckpt, wish.rules, wish.dtype, info)
        view = _contents.with_boxes(view, walked.boxes, format.boxes)
        view.guessed += guessed
        changed = _from_reader(call, place, view, info, wish, format)

        def hand_over_both() -> None:
            hand_over()
            changed.hand_over()

        return Work(changed.feed, hand_over_both, changed.write)
    skeleton = walked.skeleton  # and not the leaves

    def write(crew: Crew) -> Written:
        single = consistency.settle(call, skeleton, content, feed)
        final = assignment.plan(content, call.count, single) if single else shares
        job = native.Job(place, wish.overwrite, skeleton, content, final, info)
        with _progress.bar(f"saving {os.path.basename(place)}", feed.nbytes, wish.progress) as feed.moved:
            return native.write(stores.DISK, job, feed, crew, call)

    return Work(feed, hand_over, write)


def _walk(tree: Any, format: Format) -> walk.Walk:
    return walk.walk(flax.plain(tree) if "variable" in format.boxes else flax.split(tree)[0])


def _from_reader(call: Call, place: str, view: View, info: native.Info, wish: Wish, format: Format) -> Work:
    """The work of copying what a reader has; it is read while it is written."""
    if format.name != "treering":
        _check_kept(format, place, view, wish)
        feed = Feed([], None)
        return Work(feed, feed.run, lambda crew: _write_foreign(format, place, view, wish))
    content = _contents.of_reader(view)
    feed = Feed(list(content.sources), _HELD if wish.limit is None else wish.limit)
    assert view.skeleton is not None
    job = native.Job(place, wish.overwrite, view.skeleton, content, None, info)

    def hand_over() -> None:
        if wish.background:
            start(threading.Thread(target=_run_quietly, args=(feed,), name="treering-feed", daemon=False))
        else:
            feed.run()

    def write(crew: Crew) -> Written:
        with _progress.bar(f"saving {os.path.basename(place)}", feed.nbytes, wish.progress) as feed.moved:
            return native.write(stores.DISK, job, feed, crew, call)

    return Work(feed, hand_over, write)


def _run_quietly(feed: Feed) -> None:
    with contextlib.suppress(BaseException):  # the writers raise it
        feed.run()


def _check_kept(format: Format, place: str, view: View, wish: Wish) -> None:
    """Raises `UnsupportedError` for what was given and would be lost; logs what is left out of a copied checkpoint."""
    there = [name for name in ABOUT if getattr(view, name) is not None and (name != "metrics" or view.metrics)]
    lost = [name for name in there if name not in format.keeps(place, view)]
    if given := [name for name in lost if name in wish.given]:
        raise UnsupportedError(
            f"{place}: expected nothing that the format {format.name!r} has no place for, found {' and '.join(given)}; "
            "leave it out, put it into the tree, or save in the native format"
            + (" (a step may be part of the name, as its library has it)" if "step" in given else "")
        )
    if lost:
        _log.warning("%s: %s left out: the format %r has no place for it", place, " and ".join(lost), format.name)


def _write_foreign(format: Format, place: str, contents: Reader, wish: Wish) -> Written:
    if wish.overwrite and os.path.isdir(place):
        found = formats.detect(stores.DISK, place).name if formats.is_known(stores.DISK, place) else None
        if found != format.name:
            what = "a directory that is no checkpoint" if found is None else f"one of the format {found!r}"
            raise ExistsError(
                f"{place}: expected a checkpoint of the format {format.name!r} to replace, found {what}; choose "
                "another path or remove it yourself"
            )
    if iterators := [path for path, entry in contents.entries.items() if entry.type == "iterator"]:
        raise UnsupportedError(
            f"{place}: {', '.join(iterators)}: only the native format holds the state of data iterators; leave it out "
            "with treering.rules.drop"
        )
    begun = time.perf_counter()
    arrays = sum(entry.nbytes for entry in contents.entries.values() if isinstance(entry, ArrayEntry))
    with _progress.bar(f"saving {os.path.basename(place)}", arrays, wish.progress) as moved:
        watched: Any = _progress.Watched(contents, moved) if wish.progress else contents
        nbytes = format.write(stores.DISK, place, watched, overwrite=wish.overwrite, **wish.options)
    return Written(nbytes, time.perf_counter() - begun)


def _check_whole(content: leaves.Content) -> None:
    """Raises `UnsupportedError` for arrays of which this process, which saves alone, has not everything."""
    missing: list[str] = []
    for leaf in sorted(content.global_leaves):
        entry: Any = content.entries[leaf]
        here = sum(math.prod(extent(source.box)) for source in content.sources if source.leaf == leaf)
        if here < math.prod(entry.shape):
            missing.append(f"  {entry.path or '(root)'}: this process has {here} of {math.prod(entry.shape)} elements")
    if missing:
        raise UnsupportedError("\n".join(["processes='this' saves whole arrays; nothing was written:", *missing]))
