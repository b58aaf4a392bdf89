"""Saves in the native format, each process its own part: the tree is staged, or read while it is written."""

import functools
import os
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from .._core.skeleton import Skeleton
from .._core.source import Written
from .._processes import assignment, keepers, progress_bar
from .._processes.consistency import check_consistent
from .._pytree.lazy_supply import LazySupply, ShardSupply
from .._pytree.leaves import SLICE_BYTES, Catalogue, Described
from .._pytree.staged_supply import StagedSupply
from .._threads.pool import ThreadPool
from .._threads.python_gc import gc_paused
from ..formats.treering import write as native
from ..formats.treering.shared_files import Reuse
from . import save_source
from .contents import Changed, Unchanged
from .memory import staged_if_it_fits
from .prepared import Prepared, releasing
from .save_target import SaveTarget, requested_options

# Slices that are read ahead. The writers hold about two more (see `LazySupply`). Each is a quarter of the memory limit.
_PREFETCH_SLICES = 2
_MIN_PARALLEL_READ_BYTES = 256 << 20  # bytes; with a lower memory limit only one thread at a time reads the source
# The record of the place of a leaf that only one process has; see `write`.
_SINGLE_PROCESS_PLACE = {"unrecorded": "the devices of one process of several"}
_MIN_SLICE_BYTES = 1 << 20  # bytes of an array that are read at a time, even if the memory limit is lower


class Parts(NamedTuple):
    """The leaves of a save, the processes that write their parts, and the supply of this process's parts.

    If `shares` is None, this process writes all leaves.
    """

    skeleton: Skeleton
    catalogue: Catalogue
    shares: Mapping[int, assignment.Assignment] | None
    supply: ShardSupply
    reuse: Reuse | None = None


def staged(target: SaveTarget, contents: Unchanged) -> Prepared:
    """Plans the save of a tree whose arrays are staged unchanged."""
    skeleton, described, _, reuse = contents
    deferred = reuse.deferred if reuse else ()
    parts = stage_parts(target, skeleton, described, deferred)._replace(reuse=reuse)
    return Prepared(parts.supply, functools.partial(write, target, parts))


def stage_parts(target: SaveTarget, skeleton: Skeleton, described: Described, deferred: Collection[int] = ()) -> Parts:
    """Assigns the arrays of a live tree to the processes. The supply that it returns stages this process's parts.

    deferred: the leaves that are staged last; see `StagedSupply`.
    """
    call, catalogue, options = target.call, described.catalogue, target.options
    with gc_paused():
        shares = assignment.assign(catalogue, call.count) if call.count > 1 else None
        # In a store that limits the size of objects, `native.write` cuts pieces up, and the parts have no keepers.
        if shares and options.copies > 1 and options.hosts and not target.store.object_bytes:
            shares = keepers.with_keepers(catalogue, shares, options.hosts)
        shards, data = assignment.select_shards(described, shares, call.index)
        count = 0
        if deferred:
            order = sorted(range(len(shards)), key=lambda n: shards[n].leaf in deferred)
            shards, data = [shards[n] for n in order], [data[n] for n in order]
            count = sum(shard.leaf in deferred for shard in shards)
        staging = StagedSupply(shards, data, options.memory_limit, target.memory_ok, count)
    return Parts(skeleton, catalogue, shares, staging)


def read_while_written(target: SaveTarget, contents: Changed, check: Callable[[], None] = lambda: None) -> Prepared:
    """Plans the save of a view, which the writers read box by box.

    A live tree is staged first, unless its copies take too much memory. The reader calls `check` before it reads more;
    `check` raises if the save has failed elsewhere. No process writes second copies of array files, because it
    would have to read those parts of the view too. The files are copied after the commit instead.
    """
    call, limit, (view, live, _) = target.call, target.options.memory_limit, contents
    staging = staged_if_it_fits(target, live) if live else None
    assert view.skeleton is not None
    slice_bytes = SLICE_BYTES if limit is None else min(max(limit // 4, _MIN_SLICE_BYTES), SLICE_BYTES)
    # Reading unchanged leaves takes no memory beyond the slice itself, so parallel reads stay within the limit.
    is_unchanged = bool(view.identity) and all(leaf.plain for leaf in view.leaves.values())
    parallel = limit is None or limit >= _MIN_PARALLEL_READ_BYTES or is_unchanged
    alone = call.count == 1
    described = save_source.describe_view(
        view, live, slice_bytes if alone else None, target.store.object_bytes if alone else None
    )
    shares = None if alone else assignment.assign(described.catalogue, call.count)
    shards, _ = assignment.select_shards(described, shares, call.index)
    # Reading ahead hides the delay of requests over a network. A file that can be mapped is on a local disk.
    prefetch_groups = _PREFETCH_SLICES if is_unchanged and not view.can_mmap(None) else 0
    block_caller = live is not None and staging is None
    reading = LazySupply(
        view,
        shards,
        slice_bytes,
        parallel=parallel,
        prefetch_groups=prefetch_groups,
        block_caller=block_caller,
        before_read=check,
    )
    parts = Parts(view.skeleton, described.catalogue, shares, reading)
    return Prepared(staging or reading, releasing(reading, functools.partial(write, target, parts)))


def write(target: SaveTarget, parts: Parts, pool: ThreadPool) -> Written:
    """Compares the trees of all processes, writes the part of this process, and commits."""
    call, options, (skeleton, catalogue, shares, supply, reuse) = target.call, target.options, parts
    catalogue, single = check_consistent(call, skeleton, catalogue, supply, requested_options(target))
    # `single` maps each leaf that only one process has to that process. It must write the leaf.
    if single:
        # These shares have no keepers, because the second copies that are staged may not fit them. The files are copied
        # after the commit instead.
        shares = assignment.assign(catalogue, call.count, single)
    if shares is not None:
        shares = {**shares, **assignment.assign_states(catalogue.entries, call.count)}
    if single:
        # The manifest has the places as process 0 sees them. If process 0 has such a leaf, that looks to it like a leaf
        # of which each process has a copy on its own devices. A restore would then put it on the devices of every
        # process. So the places of these leaves are not recorded.
        places = [_SINGLE_PROCESS_PLACE if n in single else place for n, place in enumerate(catalogue.places)]
        catalogue = catalogue._replace(places=places)
    job = native.Job(
        target.path, options.overwrite, skeleton, catalogue, shares, target.info, options.hosts, options.room_maker,
        reuse,
    )  # fmt: skip
    with progress_bar.bar(
        f"saving {os.path.basename(target.path)}", supply.nbytes, options.progress
    ) as supply.on_progress:
        return native.write(target.store, job, supply, pool, call)
