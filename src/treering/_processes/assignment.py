"""Assigns each piece to the process that writes it. All functions are deterministic: each process computes the same.

A piece is a rectangular part of a global array. One process holds it, or several if it is replicated. Exactly one of
the holders writes it, chosen so that all processes write about the same number of bytes.
"""

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from .._core import dtypes
from .._core.boxes import Box, Cells, box_shape, full_box, intersect, slice_boxes, slices
from .._core.entries import ArrayEntry, StatesEntry
from .._core.layouts import Layout, held_by, owner
from .._pytree.leaves import Catalogue, Described, LocalShard, write_order_key
from .layouts import layout_of

_MIN_CUT_BYTES = 1 << 20  # bytes; no part of a cut piece has fewer, and arrays of smaller pieces go to few writers
_MAX_LOOPED_PIECES = 16  # pieces of an array; up to this number a loop over them is faster than NumPy
NO_KEEPER = -1
_CELLS_PER_PART = 8  # cells for each part of a piece whose rows cannot be divided evenly into parts


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A piece that this process writes, or a range of its bytes: `nbytes` of shard number `shard`, from `begin` on."""

    leaf: int
    box: Box
    shard: int
    begin: int
    nbytes: int


class Assignment(NamedTuple):
    """The writers of an array: process `writers[i]` writes the piece `boxes[i]`.

    layout: the layout with these boxes, unless they are cut up. The writers are row `turn` of its `holders.turns`.
    keepers: the processes that write a second copy of each piece on another disk, or `NO_KEEPER`. None: no copies.
    """

    boxes: Sequence[Box]
    writers: Sequence[int] | np.ndarray  # processes
    layout: Layout | None = None
    turn: int = 0
    keepers: np.ndarray[Any, np.dtype[np.int64]] | None = None


Sizes = list[tuple[int, Box, int]]  # pieces: the leaf, the box and the size in bytes of each


def assign(catalogue: Catalogue, count: int, single: Mapping[int, int] | None = None) -> dict[int, Assignment]:
    """Returns the shares of all arrays of a tree, by leaf, for a job of `count` processes.

    An array that each process has its own copy of is treated as held by all processes. `single` maps leaves that exist
    in one process alone to that process. The global arrays are assigned first, so that their writers do not depend on
    `single`: the processes learn it only after they have staged their global arrays.
    """
    arrays = (n for n, entry in enumerate(catalogue.entries) if isinstance(entry, ArrayEntry))
    leaves = [n for n in arrays if n not in catalogue.tied]
    together: dict[int, tuple[Layout, int]] = {}
    copied: dict[int, tuple[Layout, int]] = {}
    everyone = tuple(range(count))
    for n in leaves:
        entry: Any = catalogue.entries[n]
        layout, is_joint = held_layout(catalogue, n, everyone, single)
        (together if is_joint else copied)[n] = layout, dtypes.itemsize(entry.dtype)
    loads = np.zeros(count, np.int64)
    total = sum(layout.nbytes(itemsize) for layout, itemsize in (*together.values(), *copied.values()))
    shares: dict[int, Assignment] = {}
    for group in (together, copied):
        shares.update(zip(group, balance(list(group.values()), loads, total // count), strict=True))
    return shares


def held_layout(
    catalogue: Catalogue, leaf: int, everyone: tuple[int, ...], single: Mapping[int, int] | None = None
) -> tuple[Layout, bool]:
    """Returns the pieces of an array and the processes that hold each, and True if the processes hold it jointly.

    The parameters are as in `assign`; `everyone` are all processes.
    """
    entry: Any = catalogue.entries[leaf]
    layout = layout_of(catalogue.shardings[leaf], entry.shape) if leaf in catalogue.shardings else None
    if layout and leaf in catalogue.global_leaves and owner(layout) is None:
        return layout, True
    boxes = layout.boxes if layout else Cells.of([full_box(entry.shape)])[0]
    return held_by(boxes, (single[leaf],) if single and leaf in single else everyone), False


def assign_states(entries: Sequence[Any], count: int) -> dict[int, Assignment]:
    """Returns the shares of the iterator states that are stored in array files: each process writes its own state."""
    stored = {n: one for n, one in enumerate(entries) if isinstance(one, StatesEntry) and len(one.value) == count}
    return {n: Assignment([one.box(process) for process in range(count)], range(count)) for n, one in stored.items()}


def cut(entries: Sequence[Any], pieces: Sequence[Piece], max_bytes: int) -> list[Piece]:
    """Returns the pieces of a process that writes alone; pieces of more than `max_bytes` are cut up."""
    part_shapes = _part_shapes(entries, ((piece.leaf, piece.box) for piece in pieces), max_bytes)
    found: list[Piece] = []
    for piece in pieces:
        if piece.leaf not in part_shapes:
            found.append(piece)
            continue
        itemsize = dtypes.itemsize(entries[piece.leaf].dtype)
        begin = piece.begin
        for part in _parts_of_shape(piece.box, part_shapes[piece.leaf]):
            nbytes = itemsize * math.prod(box_shape(part))
            found.append(Piece(piece.leaf, part, piece.shard, begin, nbytes))
            begin += nbytes
    return found


def cut_assignments(entries: Sequence[Any], shares: Mapping[int, Assignment], max_bytes: int) -> dict[int, Assignment]:
    """Returns the shares with boxes of more than `max_bytes` cut up. The writer of a box writes all of its parts."""
    part_shapes = _part_shapes(
        entries, ((leaf, box) for leaf, share in shares.items() for box in share.boxes), max_bytes
    )
    found = dict(shares)
    for leaf, shape in part_shapes.items():
        parts = [(part, n) for n, box in enumerate(shares[leaf].boxes) for part in _parts_of_shape(box, shape)]
        found[leaf] = Assignment([part for part, _ in parts], [int(shares[leaf].writers[n]) for _, n in parts])
    return found


def cells_of(boxes: Sequence[Box], itemsize: int, max_bytes: int) -> list[Box]:
    """Returns the boxes of an array, all cut up if the largest has more than `max_bytes`."""
    shape = _part_shape(boxes, itemsize, max_bytes)
    return [part for box in boxes for part in _parts_of_shape(box, shape)] if shape else list(boxes)


def _part_shapes(
    entries: Sequence[Any], boxes: Iterable[tuple[int, Box]], max_bytes: int
) -> dict[int, tuple[int, ...]]:
    """Returns the shape of the parts, in elements, for each leaf that has a box of more than `max_bytes`."""
    by_leaf: dict[int, list[Box]] = {}
    for leaf, box in boxes:
        by_leaf.setdefault(leaf, []).append(box)
    found = ((leaf, _part_shape(own, dtypes.itemsize(entries[leaf].dtype), max_bytes)) for leaf, own in by_leaf.items())
    return {leaf: shape for leaf, shape in found if shape}


def _part_shape(boxes: Sequence[Box], itemsize: int, max_bytes: int) -> tuple[int, ...] | None:
    """Returns the shape of the parts of an array's boxes; None if no box has more than `max_bytes`.

    A part of this shape is contiguous in its box. The shape is the same for every box, so that a grid of boxes
    stays a grid.
    """
    shape = [max(stop - start for start, stop in axis) for axis in zip(*boxes, strict=True)]
    if itemsize * math.prod(shape) <= max_bytes:
        return None
    return box_shape(next(slice_boxes(shape, itemsize, max_bytes)))


def _parts_of_shape(box: Box, shape: Sequence[int]) -> Iterator[Box]:
    """Yields the parts of a box that have a shape, in C order. The last ones along an axis may be smaller."""
    axes = zip(box, shape, strict=True)
    return itertools.product(
        *([(n, min(n + size, stop)) for n in range(start, stop, size)] for (start, stop), size in axes)
    )


def assign_unshared(spread: Iterable[int], pieces: Sequence[Piece]) -> dict[int, Assignment]:
    """Returns the shares of the leaves that are spread over the devices of a process that writes alone."""
    boxes: dict[int, list[Box]] = {leaf: [] for leaf in spread}
    for piece in pieces:
        own = boxes.get(piece.leaf)
        if own is not None and (not own or own[-1] != piece.box):  # The same box again is the same piece.
            own.append(piece.box)
    return {leaf: Assignment(own, [0] * len(own)) for leaf, own in boxes.items()}


def select_shards(
    described: Described, shares: Mapping[int, Assignment], index: int
) -> tuple[Sequence[LocalShard], list[Any]]:
    """Returns the shards that process `index` stages, in the order in which it writes them, and their arrays.

    It stages the parts of global arrays that it writes, and all of the arrays that each process has its own copy of,
    because `check_consistent` compares these copies. The pieces for second copies come last, as separate shards, so
    that the shards of its own files are freed first.
    """
    catalogue, shards, data = described
    own = _by_leaf(shards)
    chosen: dict[int, tuple[LocalShard, Any]] = {}
    for leaf, box, _ in piece_sizes(catalogue.entries, shares, index):
        if leaf in own:  # A leaf may exist only in another process; `check_consistent` finds that later.
            n, shard = _containing(own[leaf], box)
            if leaf in catalogue.global_leaves and shard.box != box:
                # Keys are the numbers of shards. A part has none, so its key is one that no shard and no part has.
                chosen[len(shards) + len(chosen)] = _part(shard, data[n], box)
            else:
                chosen[n] = shard, data[n]
    compared = (n for n, shard in enumerate(shards) if shard.leaf not in catalogue.global_leaves)
    staged = list({**chosen, **{n: (shards[n], data[n]) for n in compared}}.values())
    for leaf, box, _ in itertools.chain(*kept_sizes(catalogue.entries, shares, index).values()):
        if leaf in own:
            n, shard = _containing(own[leaf], box)
            part, array = (shard, data[n]) if shard.box == box else _part(shard, data[n], box)
            staged.append((msgspec.structs.replace(part, for_second_copy=True), array))
    return [shard for shard, _ in staged], [array for _, array in staged]


def pieces(
    entries: Sequence[Any], shards: Sequence[LocalShard], shares: Mapping[int, Assignment] | None, index: int
) -> list[Piece]:
    """Returns the pieces that process `index` writes, in order; if `shares` is None, one for each shard.

    Successive ones with the same leaf and box are ranges of bytes of one piece.
    """
    if shares is None:
        return [Piece(s.leaf, s.box if s.piece is None else s.piece, n, 0, s.nbytes) for n, s in enumerate(shards)]
    own = _by_leaf(shards)
    found: list[Piece] = []
    for leaf, box, nbytes in piece_sizes(entries, shares, index):
        if isinstance(entries[leaf], StatesEntry):
            # This process holds only its own state, so `begin` is relative to the begin of that state.
            ((n, _),), begin = own[leaf], box[0][0] - entries[leaf].box(index)[0][0]
            found.append(Piece(leaf, box, n, begin, nbytes))
            continue
        n, shard = _containing(own[leaf], box)
        begin = dtypes.itemsize(entries[leaf].dtype) * _offset(box, shard.box)
        found.append(Piece(leaf, box, n, begin, nbytes))
    return found


def kept_pieces(
    entries: Sequence[Any], shards: Sequence[LocalShard], shares: Mapping[int, Assignment], index: int
) -> dict[int, list[Piece]]:
    """Returns the pieces of which process `index` writes a second copy, by writer, each in the writer's order."""
    places = {(shard.leaf, shard.box): n for n, shard in enumerate(shards) if shard.for_second_copy}
    return {
        writer: [Piece(leaf, box, places[leaf, box], 0, nbytes) for leaf, box, nbytes in sizes]
        for writer, sizes in kept_sizes(entries, shares, index).items()
    }


def piece_sizes(entries: Sequence[Any], shares: Mapping[int, Assignment], index: int) -> Sizes:
    """Returns leaf, box and size in bytes of each piece that process `index` writes, in the order of writing.

    Pieces with the same keeper are together, because they are in files of their own, in the order of `write_order_key`.
    """
    return list(itertools.chain(*sizes_by_keeper(entries, shares, index).values()))


def sizes_by_keeper(entries: Sequence[Any], shares: Mapping[int, Assignment], index: int) -> dict[int, Sizes]:
    """Returns the pieces of `piece_sizes` by the process that writes their second copy; `NO_KEEPER` comes first."""
    found: dict[int, Sizes] = {}
    for leaf in sorted(shares):
        share, itemsize = shares[leaf], dtypes.itemsize(entries[leaf].dtype)
        numbers = np.flatnonzero(np.asarray(share.writers) == index)
        sizes = [(leaf, box := share.boxes[n], itemsize * math.prod(box_shape(box))) for n in numbers.tolist()]
        if share.keepers is None:
            found.setdefault(NO_KEEPER, []).extend(sizes)
            continue
        for keeper, size in zip(share.keepers[numbers].tolist(), sizes, strict=True):
            found.setdefault(keeper, []).append(size)
    return _in_order_of_writing(found)


def kept_sizes(entries: Sequence[Any], shares: Mapping[int, Assignment], index: int) -> dict[int, Sizes]:
    """Returns the pieces of which process `index` writes a second copy, by the process that writes the first."""
    found: dict[int, Sizes] = {}
    for leaf, share in sorted(shares.items()):
        if share.keepers is None:
            continue
        itemsize = dtypes.itemsize(entries[leaf].dtype)
        for n in np.flatnonzero(share.keepers == index).tolist():
            box = share.boxes[n]
            size = leaf, box, itemsize * math.prod(box_shape(box))
            found.setdefault(int(share.writers[n]), []).append(size)
    return _in_order_of_writing(found)


def _in_order_of_writing(groups: Mapping[int, Sizes]) -> dict[int, Sizes]:
    return {key: sorted(groups[key], key=lambda one: write_order_key(one[2])) for key in sorted(groups)}


def _by_leaf(shards: Sequence[LocalShard]) -> dict[int, list[tuple[int, LocalShard]]]:
    found: dict[int, list[tuple[int, LocalShard]]] = {}
    for n, shard in enumerate(shards):
        found.setdefault(shard.leaf, []).append((n, shard))
    return found


def _containing(shards: Sequence[tuple[int, LocalShard]], box: Box) -> tuple[int, LocalShard]:
    """Returns the number of the shard that contains a box, and the shard."""
    return next(one for one in shards if one[1].box == box or intersect(one[1].box, box) == box)


def _part(shard: LocalShard, data: Any, box: Box) -> tuple[LocalShard, Any]:
    """Returns a part of a shard as a shard. From an accelerator, only that part is copied."""
    if data is not None:  # None stands for data that is read on demand.
        data = (data if shard.needs_copy else np.asarray(data))[slices(box, shard.box)]
    nbytes = math.prod(box_shape(box)) * shard.dtype.itemsize
    return LocalShard(shard.leaf, box, shard.dtype, nbytes, shard.needs_copy, path=shard.path), data


def _offset(box: Box, origin: Box) -> int:
    """Returns the number of elements of the box `origin`, in C order, before the first element of `box`."""
    found = 0
    for (start, _), (first, last) in zip(box, origin, strict=True):
        found = found * (last - first) + start - first
    return found


def balance(arrays: Sequence[tuple[Layout, int]], loads: np.ndarray, fair: int) -> list[Assignment]:
    """Chooses the writers of arrays, given as layouts and bytes per element.

    `loads` are the bytes that each process writes already; this function adds the bytes that it assigns. `fair` is the
    number of bytes that each process should write. The arrays with the largest pieces come first. Each goes to the
    holders that have the least to write. Pieces larger than a quarter of a fair share are cut up among their holders,
    so no process gets more than about a quarter above its fair share. Small arrays go to the processes that are closest
    to their fair share, or to a megabyte if that is more, so that few processes write them.
    """
    min_part = max(fair // 8, _MIN_CUT_BYTES)  # A piece of a quarter of a fair share is the smallest to have two parts.
    full = max(fair, _MIN_CUT_BYTES)
    shares: list[Any] = [None] * len(arrays)
    held: dict[Layout, np.ndarray] = {}  # elements by process
    for n in sorted(range(len(arrays)), key=lambda n: -arrays[n][0].largest * arrays[n][1]):
        layout, itemsize = arrays[n]
        turns, largest = layout.holders.turns, layout.largest * itemsize
        parts = min(len(turns), largest // min_part)
        if parts > 1:
            shares[n] = _cut_up(layout, itemsize, parts, loads)
            continue
        if len(turns) == 1:  # A layout may have 100,000 processes, so its loads are computed once for all its arrays.
            if layout not in held:
                held[layout] = np.bincount(turns[0], layout.elements, len(loads)).astype(np.int64)
            loads += held[layout] * itemsize
            shares[n] = Assignment(layout.boxes, turns[0], layout)
            continue
        sizes = layout.elements * itemsize
        # The loads of the writers of each turn, with their pieces. If all pieces have the same size, it does not change
        # the order of the turns, and is subtracted from the limit instead.
        after = loads.take(turns)
        if not layout.is_regular:
            after += sizes
        # With few pieces and many holders, NumPy's `max` would reduce the short axis row by row, which is slow.
        most = after.max(axis=1) if len(sizes) > _MAX_LOOPED_PIECES else functools.reduce(np.maximum, after.T)
        limit = full - largest if layout.is_regular else full
        turn = int(most.argmin())
        # A small array goes to the busiest writers that have room. Otherwise each process would write a small file.
        if largest < _MIN_CUT_BYTES and most[turn] <= limit:
            turn = int(np.where(most <= limit, most, -1).argmax())
        np.add.at(loads, turns[turn], sizes)
        shares[n] = Assignment(layout.boxes, turns[turn], layout, turn)
    return shares


def _cut_up(layout: Layout, itemsize: int, parts: int, loads: np.ndarray) -> Assignment:
    boxes: list[Box] = []
    writers: list[int] = []
    cuts = _cuts(layout, itemsize, parts)
    for box, holders in zip(layout.boxes, layout.holders, strict=True):
        idlest = np.array(holders)[np.argsort(loads[list(holders)], kind="stable")]
        for cell, writer in zip(cut_box(box, cuts), itertools.cycle(idlest)):
            boxes.append(cell)
            writers.append(int(writer))
            loads[writer] += math.prod(box_shape(cell)) * itemsize
    return Assignment(boxes, writers)


class AxisCut(NamedTuple):
    """The number of parts that an axis is cut into. The parts begin at multiples of `rows` rows."""

    parts: int
    rows: int


def _cuts(layout: Layout, itemsize: int, parts: int) -> list[AxisCut]:
    """Returns the cuts of each axis. They are along the leading axes, so that each cell is contiguous in its box.

    The cuts are the same for every box, so that the cells of a grid form a grid again. If the rows do not divide evenly
    into `parts` parts, there are about eight cells for each part, so that all writers get nearly as much.
    """
    shape = tuple(max(map(operator.sub, axis[1:], axis)) for axis in layout.boxes.cuts)
    cuts: list[AxisCut] = []
    finer = 1
    for axis, size in enumerate(shape):
        if finer == 1 and size % parts and parts % size and size < _CELLS_PER_PART * parts:
            finer = _CELLS_PER_PART
            parts *= finer
        if size % parts == 0 or size >= parts * _CELLS_PER_PART // finer:
            row = itemsize * math.prod(shape[axis + 1 :])
            even = 64 // math.gcd(row, 64)  # JAX can adopt memory without a copy only at multiples of 64 bytes.
            cuts.append(AxisCut(parts, even if size >= _CELLS_PER_PART * parts * even else 1))
            parts = 1
        else:
            cuts.append(AxisCut(size, 1))
            parts = -(-parts // size)
    return cuts


def cut_box(box: Box, cuts: Sequence[AxisCut]) -> Iterator[Box]:
    """Yields the cells of a box that is cut into so many parts along each axis, in C order."""
    axes = [_ranges(start, stop, cut) for (start, stop), cut in zip(box, cuts, strict=True)]
    return itertools.product(*axes)


def _ranges(start: int, stop: int, cut: AxisCut) -> list[tuple[int, int]]:
    size = stop - start
    parts = min(cut.parts, size)
    steps = [n * size // parts // cut.rows * cut.rows for n in range(parts)]
    ends = [*sorted({start + step for step in steps}), stop]
    return list(itertools.pairwise(ends))
