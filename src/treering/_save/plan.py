"""Plans a save: who writes which bytes, and from where the writers read them.

| tree | processes | format | plan |
| --- | --- | --- | --- |
| a live tree as it is | any number | native | `NativePlan`, staged |
| checkpoint | several | any | `CopyPlan` |
| changed by rules or the format, cannot be written in parts | several | any | `TemporaryPlan` |
| any other | any number | native | `NativePlan`, read while it is written |
| any other | any number | foreign | `ForeignPlan` |

A plan is data: `write` executes it. The memory limit does not choose the plan. It decides only whether the caller waits
until its arrays are copied. Where each host has its own disk, `TemporaryPlan` is impossible, so planning raises.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash

from .._core import dtypes, host_memory, units
from .._core.boxes import Box, box_shape, full_box, slice_boxes
from .._core.entries import ArrayEntry, StatesEntry
from .._core.skeleton import Skeleton
from .._core.views import View
from .._processes import assignment, coordinator
from .._processes.assignment import cells_of
from .._processes.consistency import gather_from_equal_calls
from .._processes.layouts import layout_of
from .._pytree.lazy_supply import LazySupply, ShardSupply
from .._pytree.leaves import SLICE_BYTES, Catalogue, Described, LocalShard, write_order_key
from .._pytree.live_tree import LiveTree
from .._pytree.staged_supply import StagedSupply
from .._restore.checkpoint import Checkpoint
from ..errors import MismatchError, UnsupportedError
from ..formats import JointFormat
from . import second_copies
from .save_reuse import SaveReuse
from .source import Deltas, PlainTree, SavedTree, TreeView
from .target import NativeTarget, SaveTarget

_MAX_PROCESSES_ON_A_HOST = 8  # all may ask for room at the same moment, before any of them has taken it
# Slices that are read ahead. The writers hold about two more (see `LazySupply`). Each is a quarter of the memory limit.
_PREFETCH_SLICES = 2
_MIN_PARALLEL_READ_BYTES = 256 << 20  # bytes; with a lower memory limit only one thread at a time reads the source
_MIN_SLICE_BYTES = 1 << 20  # bytes of an array that are read at a time, even if the memory limit is lower
_log = logging.getLogger("treering")


class NativePlan(NamedTuple):
    """Each process writes its part in the native format.

    shares: the processes that write each array; None if this process writes all.
    supply: the bytes that the writers take.
    caller: what the caller's thread runs: the staging of a live tree, or else `supply`.
    """

    target: SaveTarget
    skeleton: Skeleton
    catalogue: Catalogue
    shares: Mapping[int, assignment.Assignment] | None
    supply: ShardSupply
    caller: ShardSupply
    reuse: SaveReuse | None = None
    deltas: Deltas | None = None


class ForeignPlan(NamedTuple):
    """The format writes the leaves of a view, which it reads by `reading`, box by box.

    compared: the arrays that must be equal in all processes; None in a save of one process.
    is_live: True for a live tree, False for a checkpoint.
    """

    target: SaveTarget
    view: View
    compared: Described | None
    reading: LazySupply
    caller: ShardSupply
    is_live: bool


class CopyPlan(NamedTuple):
    """Process 0 copies a checkpoint that all processes have opened. `own` is its plan, and None in its peers."""

    target: SaveTarget
    own: NativePlan | ForeignPlan | None
    caller: ShardSupply


class TemporaryPlan(NamedTuple):
    """A live tree is spread over processes, and only one process can write the requested form of it.

    All processes save the tree next to the path, in the native format. Process 0 then makes the requested checkpoint
    from that temporary one, in bounded memory.

    change: makes the view to write of the temporary checkpoint. It holds no live array, so these can be freed once they
        are staged.
    """

    target: SaveTarget
    temporary: NativePlan
    change: Callable[[Checkpoint], View]
    caller: ShardSupply


Plan = NativePlan | ForeignPlan | CopyPlan | TemporaryPlan


def plan_save(target: SaveTarget, tree: SavedTree) -> Plan:
    """Plans the part of this process. All processes of a call choose the same kind of plan.

    Raises `MismatchError` if the rules of two processes make a leaf from different leaves. Raises `UnsupportedError` if
    the format cannot store something, or if each host has its own disk and the processes cannot write their parts
    separately.
    """
    if tree.described and target.options.memory_limit is None:
        target = _with_memory_limit(target, tree.described)
    if isinstance(tree, PlainTree):
        return _staged(target, tree.skeleton, tree.described, tree.reuse)._replace(deltas=tree.deltas)
    view, live, change, _ = tree
    in_parts = target.call.count == 1 or live is None or _can_write_in_parts(target, view, live)
    if not in_parts and target.options.hosts:
        raise UnsupportedError(
            f"{target.path}: expected a save in which each process writes its own part, because the hosts' "
            "disks are not shared; found rules for which one process needs arrays of its peers: make those "
            "arrays in the program"
        )
    target.check_info_kept(view)
    if target.call.count > 1 and live is None:
        own = plan_view(_by_process_0(target), tree) if target.call.index == 0 else None
        return CopyPlan(target, own, own.caller if own else LazySupply(view, []))
    if in_parts:
        return plan_view(target, tree)
    assert live and change
    target.check_iterators(view)
    if tree.deltas:
        _log.warning("%s: stored completely: its rules need arrays of which other processes have parts", target.path)
    temporary = _staged(target, live.skeleton, live.described)
    return TemporaryPlan(target, temporary, change, temporary.caller)


def plan_copy(target: SaveTarget, view: View, check: Callable[[], None]) -> NativePlan | ForeignPlan:
    """Plans the save of a view of a checkpoint by process 0 alone; see `plan_view`."""
    return plan_view(_by_process_0(target), TreeView(view), check)


def plan_view(target: SaveTarget, tree: TreeView, check: Callable[[], None] = lambda: None) -> NativePlan | ForeignPlan:
    """Plans the save of a view, which the writers read box by box.

    A live tree is staged first, unless its copies take too much memory. The reader calls `check` before it reads more;
    `check` raises if the save has failed elsewhere.
    """
    staging = _staged_if_it_fits(target, tree.live) if tree.live else None
    plan = _read_while_written if isinstance(target, NativeTarget) else _foreign
    return plan(target, tree, staging, check)


def _by_process_0(target: SaveTarget) -> SaveTarget:
    return target._replace(call=coordinator.begin_call("copy", processes="this"))


def _staged(target: SaveTarget, skeleton: Skeleton, described: Described, reuse: SaveReuse | None = None) -> NativePlan:
    """Assigns the arrays of a live tree to the processes. The supply stages this process's parts.

    The leaves that files of earlier steps probably have are staged last; see `StagedSupply`.
    """
    call, catalogue, options = target.call, described.catalogue, target.options
    shares = assignment.assign(catalogue, call.count) if call.count > 1 else None
    # In a store that limits the size of objects, `NativeSave` cuts pieces up, and the parts have no keepers.
    if shares and options.copies > 1 and options.hosts and not target.store.object_bytes:
        shares = second_copies.with_keepers(catalogue, shares, options.hosts)
    if shares is None:
        shards, data = described.shards, described.data
    else:
        shards, data = assignment.select_shards(described, shares, call.index)
    count, deferred = 0, reuse.deferred if reuse else ()
    if deferred:
        order = sorted(range(len(shards)), key=lambda n: shards[n].leaf in deferred)
        shards, data = [shards[n] for n in order], [data[n] for n in order]
        count = sum(shard.leaf in deferred for shard in shards)
    staging = StagedSupply(shards, data, options.memory_limit, target.memory_ok, count)
    return NativePlan(target, skeleton, catalogue, shares, staging, staging, reuse)


def _read_while_written(
    target: SaveTarget, tree: TreeView, staging: StagedSupply | None, check: Callable[[], None]
) -> NativePlan:
    """Plans the save of a view in the native format.

    No process writes second copies of array files, because it would have to read those parts of the view too. The files
    are copied after the commit instead.
    """
    call, limit, view, live = target.call, target.options.memory_limit, tree.view, tree.live
    assert view.skeleton is not None
    slice_bytes = SLICE_BYTES if limit is None else min(max(limit // 4, _MIN_SLICE_BYTES), SLICE_BYTES)
    # Reading unchanged leaves takes no memory beyond the slice itself, so parallel reads stay within the limit.
    is_unchanged = bool(view.identity) and all(leaf.plain for leaf in view.leaves.values())
    parallel = limit is None or limit >= _MIN_PARALLEL_READ_BYTES or is_unchanged
    alone = call.count == 1
    described = _describe_view(view, live, slice_bytes if alone else None, target.store.object_bytes if alone else None)
    shares = None if alone else assignment.assign(described.catalogue, call.count)
    shards = described.shards if shares is None else assignment.select_shards(described, shares, call.index)[0]
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
    return NativePlan(
        target, view.skeleton, described.catalogue, shares, reading, staging or reading, deltas=tree.deltas
    )


def _foreign(
    target: SaveTarget, tree: TreeView, staging: StagedSupply | None, check: Callable[[], None]
) -> ForeignPlan:
    view, live = tree.view, tree.live
    compared = _replicated_shards(_describe_view(view, live, SLICE_BYTES)) if target.call.count > 1 else None
    block_caller = live is not None and staging is None
    reading = LazySupply(view, compared.shards if compared else [], block_caller=block_caller, before_read=check)
    return ForeignPlan(target, view, compared, reading, staging or reading, live is not None)


def _can_write_in_parts(target: SaveTarget, view: View, live: LiveTree) -> bool:
    """Returns True if each process can write its part of a view of a live tree.

    Raises `MismatchError` if the rules of two processes make a leaf from different leaves.
    """
    can = isinstance(target, NativeTarget)
    if isinstance(target.format, JointFormat) and target.store.has_folders:
        can = _can_write(target.format, _describe_view(view, live, None).catalogue)
    can = can and not _cross_process_paths(view, live)
    # Every process must return the same answer, so they exchange theirs. They can differ: an array that only one
    # process holds looks to that process like a local array, and to its peers like a global one.
    sources = xxhash.xxh3_128_hexdigest(msgspec.json.encode([[path, view.source(path)] for path in view.leaves]))
    return gather_from_equal_calls(target.call, target.requested(), [can, sources], _agree_can_write)


def _can_write(format: JointFormat, catalogue: Catalogue) -> bool:
    """Returns True if each process can write its part of the arrays that are spread over several processes."""
    for leaf in catalogue.global_leaves:
        entry = array_of(catalogue, leaf)
        layout = layout_of(catalogue.shardings[leaf], entry.shape)
        if not layout.is_regular or not format.splits(entry):
            return False
    return True


def _replicated_shards(described: Described) -> Described:
    """Describes the arrays that every process has a copy of, which must be equal in all processes."""
    catalogue, shards, _ = described
    chosen = tuple(shard for shard in shards if shard.leaf not in catalogue.global_leaves)
    return Described(catalogue, chosen, [None] * len(chosen))


def array_of(catalogue: Catalogue, leaf: int) -> ArrayEntry:
    """Returns the entry of a leaf that is an array."""
    entry = catalogue.entries[leaf]
    assert isinstance(entry, ArrayEntry)
    return entry


def _cross_process_paths(view: View, live: LiveTree) -> tuple[str, ...]:
    """Returns the arrays of a view that no process can make from its own part of a live tree."""
    arrays = (path for path, leaf in view.leaves.items() if isinstance(leaf.entry, ArrayEntry))
    made = (path for path in arrays if not view.is_elementwise(path))
    return tuple(path for path in made if any(live.is_global(entry.path) for entry, _ in view.origins(path)))


def _agree_can_write(messages: Sequence[Any]) -> bool:
    """Returns True if all processes can write their parts. Raises `MismatchError` if their rules differ."""
    for process, (_, sources) in enumerate(messages):
        if sources != messages[0][1]:
            raise MismatchError(
                f"expected the same rules in every process: the rules of process {process} make some leaf from a "
                "different leaf than the rules of process 0; nothing was written"
            )
    return all(can for can, _ in messages)


def _describe_view(
    view: View, live: LiveTree | None, slice_bytes: int | None, piece_bytes: int | None = None
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
    shards.sort(key=lambda ordered: ordered[0])
    places = [_place(view, live, entry) if isinstance(entry, ArrayEntry) else None for entry in entries]
    catalogue = Catalogue(entries, {}, shardings, spread, places, view.static, view.flax_boxes)
    return Described(catalogue, tuple(shard for _, shard in shards), [None] * len(shards))


def _place(view: View, live: LiveTree | None, entry: ArrayEntry) -> Mapping[str, Any] | None:
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


def _with_memory_limit(target: SaveTarget, described: Described) -> SaveTarget:
    """Adds a memory limit if the copies would take too much of the host's memory."""
    copies = sum([shard.nbytes for shard in described.shards if shard.needs_copy])
    if coordinator.is_multi_process():
        target = target._replace(memory_ok=host_memory.host_memory_check(copies))
    limit = host_memory.copy_limit(copies)
    if limit is None:
        return target
    _log.info(
        "%s: the call waits until all but %s of its %s of copies are written, because the available memory or a "
        "limit of this process leaves no room for more; memory_limit= sets another limit",
        target.path,
        units.nbytes(limit),
        units.nbytes(copies),
    )
    return target._replace(options=target.options._replace(memory_limit=limit))


def _staged_if_it_fits(target: SaveTarget, live: LiveTree) -> StagedSupply | None:
    """Returns the staging of a live tree, or None if its copies take too much memory.

    With None the caller waits until the writers have read the tree.
    """
    limit = target.options.memory_limit
    copies = sum(shard.nbytes for shard in live.shards if shard.needs_copy)
    if limit is not None and copies > limit:
        return None
    if target.memory_ok and not target.memory_ok(copies * min(target.call.count, _MAX_PROCESSES_ON_A_HOST)):
        _log.warning(
            "%s: the call waits until the tree is read, because its copies would leave the host too little memory",
            target.path,
        )
        return None
    return live.stage()
