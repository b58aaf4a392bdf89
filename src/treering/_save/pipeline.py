"""The stages of a save: one source, the assignment of its pieces to processes, their supply to the writers, writing.

A live tree in the native format goes straight from its arrays; a source that rules or other formats change is read box
by box, by each process its part; what several processes cannot write together goes through a native checkpoint beside
the path.
"""

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash

from .. import formats, stores
from .._core import readable
from .._core.boxes import box_shape
from .._core.entries import ArrayEntry
from .._core.skeleton import Skeleton
from .._core.source import Written
from .._core.views import View
from .._processes import assignment, coordinator, progress_bar
from .._processes.calls import Call, watching
from .._processes.consistency import check_consistent, gather_alike
from .._pytree import available_memory, box_levels, flax, structures, walk
from .._pytree.leaves import SLICE_BYTES, Catalogue, Described, LocalShard
from .._pytree.live_tree import LiveTree
from .._pytree.on_demand import OnDemand, Supply
from .._pytree.staging import Staging
from .._restore.checkpoint import Checkpoint
from .._rules.base import check_list
from .._threads.pool import ThreadPool
from .._threads.python_gc import gc_paused
from .._threads.reentry import alone
from ..errors import UnsupportedError
from ..formats import Format, JointFormat
from ..formats.treering import write as native
from . import inputs, joint
from .options import SaveOptions
from .target import Target, check_free_for_all, check_kept, check_no_iterators, check_replaceable, requested

_ON_A_HOST = 8  # processes, of which each asks whether there is room before any has taken it
_AHEAD = 2  # slices, beside those that writers hold: four in all, which are what the limit allows
_PARALLEL_BYTES = 256 << 20  # bytes that must be allowed for several threads to read a source at a time
_log = logging.getLogger("treering")
_OF_ONE_PROCESS = {"unrecorded": "the devices of one process of several"}
_LEAST_SLICE_BYTES = 1 << 20  # bytes of an array that are read at a time, however little memory is allowed


class Prepared(NamedTuple):
    """A save that is ready to begin: the caller runs `supply`, then the background calls `write`."""

    supply: Supply
    write: Callable[[ThreadPool], Written]


def prepare(call: Call, path: str, tree: Any, info: native.Info, options: SaveOptions, format: Format) -> Prepared:
    """Describes the tree and finds what this process writes. Raises what `treering.save` raises before it begins."""
    check_list(options.rules)
    target = Target(call, stores.of(path), path, format, info, options)
    if isinstance(tree, Checkpoint):
        return _prepare_view(target, inputs.view_of(tree, options.rules, options.dtype, info), None)
    with gc_paused():
        walked = _walk(tree, format)
        guessed: tuple[str, ...] = ()
        if Checkpoint in set(map(type, walked.leaves)):
            walked, guessed = inputs.grafted(walked)
        described = structures.described(
            walked.paths,
            walked.leaves,
            dtype=None if options.rules else options.dtype,
            detach=options.background,
            alone=not coordinator.several(),
            together=call.count > 1,
        )
        if walked.static:
            described = described._replace(catalogue=described.catalogue._replace(static=walked.static))
        target = _with_ceiling(target, described.shards)
        if call.count == 1:
            _check_whole(described)
        if format.name == "treering" and not options.rules:
            return _prepare_tree(target, walked.skeleton, described)
    live = LiveTree(path, walked.skeleton, described)
    change = functools.partial(_changed, target, walked.boxes, guessed)
    view = change(Checkpoint(live))
    if call.count > 1 and not _writes_together(target, view, live):
        if options.own_disks:
            raise UnsupportedError(
                f"{path}: expected a save of which each process writes its own part, for the hosts' disks are not "
                "shared; found rules for which one process needs what others have: make those arrays in the program"
            )
        if format.name != "treering":
            check_kept(target, view)
            check_no_iterators(path, view)
        return _prepare_by_way_of_native(target, live, change)
    return _prepare_view(target, view, live)


def _with_ceiling(target: Target, shards: Sequence[LocalShard]) -> Target:
    """The same with a limit where the caller has set none and the copies would take too much of the host's memory."""
    if target.options.memory_limit is not None:
        return target
    copies = sum([shard.nbytes for shard in shards if shard.copies])
    if coordinator.several():
        target = target._replace(has_room=available_memory.shared_room(copies))
    limit = available_memory.ceiling(copies)
    if limit is None:
        return target
    _log.info(
        "%s: the call waits until all but %s of its %s of copies are written: that is a quarter of the memory that is "
        "available; memory_limit= sets another limit",
        target.path,
        readable.nbytes(limit),
        readable.nbytes(copies),
    )
    return target._replace(options=target.options._replace(memory_limit=limit))


def _writes_together(target: Target, view: View, live: LiveTree) -> bool:
    """Whether each process can write its part of a view of a live tree.

    They agree on it: an array that lies in one process alone looks to that one like any of its own. Raises
    `MismatchError` where rules make a leaf of another one in another process.
    """
    can = target.format.name == "treering"
    if isinstance(target.format, JointFormat) and target.store.has_folders:
        can = joint.can_write(target.format, inputs.described(view, live, None).catalogue)
    can = can and not inputs.spread_over_processes(view, live)
    sources = xxhash.xxh3_128_hexdigest(msgspec.json.encode([[path, view.source(path)] for path in view.leaves]))
    return gather_alike(target.call, requested(target), [can, sources], inputs.all_can)


def _changed(target: Target, boxes: box_levels.Boxes, guessed: tuple[str, ...], ckpt: Checkpoint) -> View:
    """A live tree, or the checkpoint that it was saved as, as it is to be written."""
    view = inputs.view_of(ckpt, target.options.rules, target.options.dtype, target.info)
    view = inputs.with_boxes(view, boxes, target.format.boxes)
    view.guessed += guessed
    return view


def _prepare_tree(target: Target, skeleton: Skeleton, described: Described) -> Prepared:
    """Prepares a live tree for the native format: its arrays are staged as they are."""
    call, catalogue = target.call, described.catalogue
    shares = assignment.plan(catalogue, call.count) if call.count > 1 else None
    staged = assignment.to_stage(described, shares, call.index)
    staging = Staging(*staged, target.options.memory_limit, target.has_room)
    return Prepared(staging, lambda pool: _write_native(target, pool, skeleton, catalogue, shares, staging))


def _prepare_view(
    target: Target, view: View, live: LiveTree | None, check: Callable[[], None] = lambda: None
) -> Prepared:
    """A checkpoint, or a live tree that rules or the format change: read box by box while it is written.

    A live tree is staged first, unless its copies are more than the limit: then the caller waits until it is read.
    `check` raises when nothing more is to be read.
    """
    call, limit = target.call, target.options.memory_limit
    if target.format.name != "treering":
        check_kept(target, view)
    if call.count > 1 and live is None:
        return _prepare_in_process_0(target, view)
    copies = sum(shard.nbytes for shard in live.shards if shard.copies) if live else 0
    fits = limit is None or copies <= limit
    if fits and target.has_room and not target.has_room(copies * min(call.count, _ON_A_HOST)):
        fits = False
        _log.warning("%s: the call waits until the tree is read, for its copies leave the host too little", target.path)
    staging = live.stage() if live and fits else None
    assert view.skeleton is not None
    skeleton = view.skeleton
    if target.format.name != "treering":
        compared = joint.compared(inputs.described(view, live, SLICE_BYTES)) if call.count > 1 else None
        reading = OnDemand(view, compared.shards if compared else [], hold=not fits, check=check)
        supply = staging or reading
        write = lambda pool: _write_foreign(target, view, skeleton, compared, reading, supply.check)  # noqa: E731
        return Prepared(supply, _ending(reading, write))
    slice_bytes = SLICE_BYTES if limit is None else min(max(limit // 4, _LEAST_SLICE_BYTES), SLICE_BYTES)
    as_it_lies = bool(view.identity) and all(leaf.plain for leaf in view.leaves.values())  # reading takes no more
    parallel = limit is None or limit >= _PARALLEL_BYTES or as_it_lies
    alone = call.count == 1
    described = inputs.described(
        view, live, slice_bytes if alone else None, target.store.object_bytes if alone else None
    )
    catalogue = described.catalogue
    shares = assignment.plan(catalogue, call.count) if call.count > 1 else None
    shards, _ = assignment.to_stage(described, shares, call.index)
    ahead = _AHEAD if as_it_lies and not view.can_mmap(None) else 0  # what can be mapped is near
    reading = OnDemand(view, shards, slice_bytes, parallel=parallel, ahead=ahead, hold=not fits, check=check)
    write = _ending(reading, lambda pool: _write_native(target, pool, skeleton, catalogue, shares, reading))
    return Prepared(staging or reading, write)


def _ending(reading: OnDemand, write: Callable[[ThreadPool], Written]) -> Callable[[ThreadPool], Written]:
    """The writing, at whose end the caller need not wait any longer, and nothing of what it has read is held."""
    once = [write]

    def ending(pool: ThreadPool) -> Written:
        try:
            return once.pop()(pool)
        finally:
            reading.release()

    return ending


def _prepare_in_process_0(target: Target, view: View) -> Prepared:
    """Prepares a checkpoint that all processes have opened: process 0 copies it, and the others wait."""
    call = target.call
    if call.index == 0:
        own = _prepare_view(target._replace(call=coordinator.begin("copy", processes="this")), view, None)
    else:
        own = Prepared(OnDemand(view, []), lambda pool: Written(0, 0))

    def write(pool: ThreadPool) -> Written:
        call.doing("copying in process 0")
        return Written(*call.broadcast(lambda: list(own.write(pool))))

    return Prepared(own.supply, write)


def _prepare_by_way_of_native(target: Target, live: LiveTree, change: Callable[[Checkpoint], View]) -> Prepared:
    """Prepares what one process has to write of a tree that lies in several.

    All processes save the tree beside the path, in the native format; process 0 makes what was asked for of that, in
    bounded memory.
    """
    call = target.call
    skeleton, catalogue = live.skeleton, live.catalogue
    shares = assignment.plan(catalogue, call.count)
    staged = assignment.to_stage(live.described, shares, call.index)
    staging = Staging(*staged, target.options.memory_limit, target.has_room)
    del live  # and its arrays

    def write(pool: ThreadPool) -> Written:
        with contextlib.ExitStack() as scratch:

            def begin() -> str:
                check_free_for_all(target)
                return scratch.enter_context(target.store.scratch_folder(target.path))

            beside = call.broadcast(begin)
            try:
                _write_native(target._replace(path=beside), pool, skeleton, catalogue, shares, staging)
            except BaseException:
                if call.index:  # whose files may have been the last in it, after process 0 has removed its own
                    with contextlib.suppress(OSError):
                        target.store.remove_folder(beside)
                raise
            call.doing("writing in process 0")
            return Written(*call.broadcast(lambda: list(_copy(target, change, beside, pool, staging.check))))

    return Prepared(staging, write)


def _copy(
    target: Target, change: Callable[[Checkpoint], View], path: str, pool: ThreadPool, check: Callable[[], None]
) -> Written:
    saved = formats.get("treering").open(target.store, path)
    view = change(Checkpoint(saved))
    own = target._replace(call=coordinator.begin("copy", processes="this"))
    return _prepare_view(own, view, None, check).write(pool)


def _write_native(
    target: Target,
    pool: ThreadPool,
    skeleton: Skeleton,
    catalogue: Catalogue,
    shares: Mapping[int, assignment.Share] | None,
    supply: Supply,
) -> Written:
    call, options = target.call, target.options
    catalogue, single = check_consistent(call, skeleton, catalogue, supply, requested(target))
    if single:
        shares = assignment.plan(catalogue, call.count, single)
    if shares is not None:
        shares = {**shares, **assignment.of_states(catalogue.entries, call.count)}
    if single:
        # To process 0, which writes the record, its own part of them looks like an array of every process.
        places = [_OF_ONE_PROCESS if n in single else place for n, place in enumerate(catalogue.places)]
        catalogue = catalogue._replace(places=places)
    job = native.Job(target.path, options.overwrite, skeleton, catalogue, shares, target.info, options.own_disks)
    with progress_bar.bar(f"saving {os.path.basename(target.path)}", supply.nbytes, options.progress) as supply.moved:
        return native.write(target.store, job, supply, pool, call)


def _walk(tree: Any, format: Format) -> walk.Walk:
    return walk.walk(flax.plain(tree)) if "variable" in format.boxes else walk.walk_split(flax.split(tree))


@alone  # a function of a rule that saved in the middle of it would wait for this save
def _write_foreign(
    target: Target,
    view: View,
    skeleton: Skeleton,
    compared: Described | None,
    reading: OnDemand,
    check: Callable[[], None],
) -> Written:
    call, format, place, options = target.call, target.format, target.path, target.options
    call.broadcast(lambda: check_replaceable(target))
    check_no_iterators(place, view)
    write: Callable[..., int] = format.write
    if compared:
        catalogue, single = check_consistent(call, skeleton, compared.catalogue, reading, requested(target))
        call.doing("writing")
        assert isinstance(format, JointFormat)
        write = functools.partial(format.write_together, call=call, layouts=joint.layouts(catalogue, single))
    begun = time.perf_counter()
    arrays = sum(entry.nbytes for entry in view.entries.values() if isinstance(entry, ArrayEntry))
    others = watching(call)

    def check_all() -> None:
        check()
        others()

    with progress_bar.bar(f"saving {os.path.basename(place)}", arrays, options.progress) as moved:
        watched: Any = progress_bar.Watched(view, moved, check_all)
        nbytes = write(target.store, place, watched, overwrite=options.overwrite, **options.of_format)
    return Written(nbytes, time.perf_counter() - begun)


def _check_whole(described: Described) -> None:
    """Raises `UnsupportedError` for arrays that this process, which saves alone, has only in part."""
    catalogue, shards, _ = described
    missing: list[str] = []
    for leaf in sorted(catalogue.global_leaves):
        entry: Any = catalogue.entries[leaf]
        here = sum(math.prod(box_shape(shard.box)) for shard in shards if shard.leaf == leaf)
        if here < math.prod(entry.shape):
            missing.append(f"  {entry.path or '(root)'}: this process has {here} of {math.prod(entry.shape)} elements")
    if missing:
        raise UnsupportedError("\n".join(["processes='this' saves whole arrays; nothing was written:", *missing]))
