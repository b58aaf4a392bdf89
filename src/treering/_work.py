"""What a save has to write, and how it gets there: of a live tree or of a checkpoint, as it is or changed by rules."""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from . import _agreement, _contents, _flax, _leaves, _processes, _progress, _shares, _tree, formats, stores
from ._catalogue import ArrayEntry
from ._checkpoint import Checkpoint
from ._collector import paused
from ._crew import Crew, start
from ._pending import Written
from ._processes import Call
from ._sharding import extent
from ._snapshot import Feed
from ._views import View
from .errors import ExistsError, UnsupportedError
from .formats import Format, Reader
from .formats.treering import write as native
from .rules import Rule

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
        walked = _tree.walk(_flax.split(tree)[0])
        content = _leaves.collect(
            walked.paths,
            walked.leaves,
            dtype=None if wish.rules else wish.dtype,
            detach=wish.background,
            alone=not _processes.several(),
        )
        if call.count == 1:
            _check_whole(content)
        shares = _shares.plan(content, call.count) if call.count > 1 else None
        sources = _shares.handed_over(content, shares, call.index)
        content.sources.clear()  # and not to be held while they are written
    feed = Feed(sources, wish.limit if direct else None)

    def hand_over() -> None:
        with paused() if wish.limit is None else contextlib.nullcontext():
            feed.run()

    if not direct:
        live = _contents.Fed(place, walked.skeleton, content, feed)
        ckpt = Checkpoint(live, live.entries, live.skeleton)
        changed = _from_reader(call, place, _contents.prepared(ckpt, wish.rules, wish.dtype, info), info, wish, format)

        def hand_over_both() -> None:
            hand_over()
            changed.hand_over()

        return Work(changed.feed, hand_over_both, changed.write)
    skeleton = walked.skeleton  # and not the leaves

    def write(crew: Crew) -> Written:
        single = _agreement.settle(call, skeleton, content, feed)
        final = _shares.plan(content, call.count, single) if single else shares
        job = native.Job(place, wish.overwrite, skeleton, content, final, info)
        with _progress.bar(f"saving {os.path.basename(place)}", feed.nbytes, wish.progress) as feed.moved:
            return native.write(stores.DISK, job, feed, crew, call)

    return Work(feed, hand_over, write)


def _from_reader(call: Call, place: str, view: View, info: native.Info, wish: Wish, format: Format) -> Work:
    """The work of copying what a reader has; it is read while it is written."""
    if format.name != "treering":
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


def _write_foreign(format: Format, place: str, contents: Reader, wish: Wish) -> Written:
    if wish.overwrite and os.path.isdir(place) and not formats.is_known(stores.DISK, place):
        raise ExistsError(
            f"{place}: expected a checkpoint to replace, found a directory that is none; remove it yourself"
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


def _check_whole(content: _leaves.Content) -> None:
    """Raises `UnsupportedError` for arrays of which this process, which saves alone, has not everything."""
    missing: list[str] = []
    for leaf in sorted(content.global_leaves):
        entry: Any = content.entries[leaf]
        here = sum(math.prod(extent(source.box)) for source in content.sources if source.leaf == leaf)
        if here < math.prod(entry.shape):
            missing.append(f"  {entry.path or '(root)'}: this process has {here} of {math.prod(entry.shape)} elements")
    if missing:
        raise UnsupportedError("\n".join(["processes='this' saves whole arrays; nothing was written:", *missing]))
