"""Saves in the native format, each process its own part: the tree is staged, or read while it is written."""

import functools
import os
from collections.abc import Callable, Mapping
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
from ..formats.treering.shared_files import Reused
from . import save_source
from .contents import Changed, Unchanged
from .memory import staged_if_it_fits
from .prepared import Prepared, releasing
from .save_target import SaveTarget, requested_options

# Slices that are read ahead. With those that the writers hold they are four, which the memory limit allows for.
_PREFETCH_SLICES = 2
_MIN_PARALLEL_READ_BYTES = 256 << 20  # bytes; with a lower memory limit only one thread at a time reads the source
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
    reused: Reused = Reused()


def staged(target: SaveTarget, contents: Unchanged) -> Prepared:
    """Plans the save of a tree whose arrays are staged unchanged."""
    parts = stage_parts(target, contents.skeleton, contents.described)._replace(reused=contents.reused)
    return Prepared(parts.supply, functools.partial(write, target, parts))


def stage_parts(target: SaveTarget, skeleton: Skeleton, described: Described) -> Parts:
    """Assigns the arrays of a live tree to the processes. The supply that it returns stages this process's parts."""
    call, catalogue, options = target.call, described.catalogue, target.options
    with gc_paused():
        shares = assignment.assign(catalogue, call.count) if call.count > 1 else None
        if shares and options.copies > 1 and options.hosts and not target.store.object_bytes:
            shares = keepers.with_keepers(catalogue, shares, options.hosts)
        shards = assignment.select_shards(described, shares, call.index)
        staging = StagedSupply(*shards, options.memory_limit, target.memory_ok)
    return Parts(skeleton, catalogue, shares, staging)


def read_while_written(target: SaveTarget, contents: Changed, check: Callable[[], None] = lambda: None) -> Prepared:
    """Plans the save of a view, which the writers read box by box.

    A live tree is staged first, unless its copies take too much memory. The reader calls `check` before it reads more;
    `check` raises if the save has failed elsewhere. No process writes second copies, because it would read twice as
    much of the view: these files are sent after the commit.
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
    # A local disk, which can be mapped, needs none.
    prefetch_groups = _PREFETCH_SLICES if is_unchanged and not view.can_mmap(None) else 0
    block_caller = live is not None and staging is None
    reading = LazySupply(
        view,
        shards,
        slice_bytes,
        parallel=parallel,
        prefetch_groups=prefetch_groups,
        block_caller=block_caller,
        check=check,
    )
    parts = Parts(view.skeleton, described.catalogue, shares, reading)
    return Prepared(staging or reading, releasing(reading, functools.partial(write, target, parts)))


def write(target: SaveTarget, parts: Parts, pool: ThreadPool) -> Written:
    """Compares the trees of all processes, writes the part of this process, and commits."""
    call, options, (skeleton, catalogue, shares, supply, reused) = target.call, target.options, parts
    catalogue, single = check_consistent(call, skeleton, catalogue, supply, requested_options(target))
    if single:  # The staged second copies may not fit these shares. They are left to the transfer after the commit.
        shares = assignment.assign(catalogue, call.count, single)
    if shares is not None:
        shares = {**shares, **assignment.assign_states(catalogue.entries, call.count)}
    if single:
        # Process 0 writes the manifest. To it, its own part of these leaves looks like an array of every process, so
        # the devices that it knows would be recorded wrongly.
        places = [_SINGLE_PROCESS_PLACE if n in single else place for n, place in enumerate(catalogue.places)]
        catalogue = catalogue._replace(places=places)
    job = native.Job(
        target.path, options.overwrite, skeleton, catalogue, shares, target.info, options.hosts, options.room_maker,
        reused,
    )  # fmt: skip
    with progress_bar.bar(
        f"saving {os.path.basename(target.path)}", supply.nbytes, options.progress
    ) as supply.on_progress:
        return native.write(target.store, job, supply, pool, call)
