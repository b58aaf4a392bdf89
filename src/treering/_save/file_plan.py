"""Plans the array files of a save: the files that it shares with earlier steps, and those that it writes."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .._core.boxes import Box
from .._core.entries import Entry
from .._processes import assignment
from .._processes.assignment import Assignment, Piece
from .._pytree.lazy_supply import ShardSupply
from .._pytree.leaves import LocalShard
from .._pytree.staged_supply import StagedSupply
from ..formats.treering.ledger import WrittenFile
from . import layout
from .layout import PlannedFile
from .save_reuse import SaveReuse


class FilePlan(NamedTuple):
    """The array files of one process.

    shared: the files that the save shares with earlier steps.
    files: the files to write. `first` counts in `to_write`.
    to_write: the pieces in them, in order.
    pieces: the pieces in both, in order.
    numbers: for each of these, its number among the pieces of the process; see `assignment.pieces`.
    likely: how many pieces of `to_write`, the first ones, have probably not changed.
    is_reordered: True unless all pieces are written in the order of their numbers.
    """

    shared: Sequence[WrittenFile]
    files: Sequence[PlannedFile]
    to_write: Sequence[Piece]
    pieces: Sequence[Piece]
    numbers: Sequence[int]
    likely: int
    is_reordered: bool

    def numbers_in(self, file: PlannedFile) -> Sequence[int]:
        """Returns the numbers of the pieces in a file to write."""
        begin = len(self.pieces) - len(self.to_write) + file.first
        return self.numbers[begin : begin + len(file.begins)]

    @property
    def runs(self) -> list[tuple[int, int]] | None:
        """The numbers as runs of successive ones: the first and the end of each. None if all are in order."""
        if not self.is_reordered:
            return None
        breaks = [n for n in range(1, len(self.numbers)) if self.numbers[n] != self.numbers[n - 1] + 1]
        edges = [0, *breaks, len(self.numbers)]
        return [(self.numbers[a], self.numbers[b - 1] + 1) for a, b in itertools.pairwise(edges) if a < b]


def plan_files(
    entries: Sequence[Entry],
    staging: ShardSupply,
    shares: Mapping[int, Assignment] | None,
    index: int,
    most: int | None,
    reuse: SaveReuse | None,
    bases: Any,
) -> FilePlan:
    """Returns the plan for process `index`, whose files have at most `most` bytes.

    shares: the processes that write each array; None if this process writes all.
    bases: see `SaveReuse.find_bases`.
    """
    shards = staging.shards
    if shares is None:
        pieces = _pieces_of_one_process(entries, shards, most)
        groups: Sequence[int] = [len(pieces)]
    else:
        pieces = assignment.pieces(entries, shards, shares, index)
        groups = [len(sizes) for sizes in assignment.sizes_by_keeper(entries, shares, index).values()]
    by_shard = isinstance(staging, StagedSupply) and staging.is_limited
    chosen = reuse.choose(bases, entries, pieces, by_shard=by_shard) if reuse else None
    if chosen is None:
        files = _planned_files(entries, pieces, range(len(pieces)), groups, most)[1]
        return FilePlan((), files, pieces, pieces, range(len(pieces)), 0, False)
    to_write, files = _planned_files(entries, pieces, chosen.order, chosen.groups, most)
    shared = [n for one in chosen.shared for n in one.numbers]
    in_order = [*(pieces[n] for n in shared), *to_write]
    return FilePlan(chosen.shared, files, to_write, in_order, [*shared, *chosen.order], chosen.likely, True)


def in_order_of_files(sizes: assignment.Sizes, runs: Sequence[tuple[int, int]] | None) -> Iterable[tuple[int, Box]]:
    """Returns the leaf and the box of each piece of a process, in the order of its files; see `FilePlan.runs`."""
    found = [(leaf, box) for leaf, box, _ in sizes]
    return found if runs is None else itertools.chain(*(found[first:end] for first, end in runs))


# A training loop saves the same structure at every step. So the results of the last save are kept: the shards, and the
# pieces; these pieces with their order, and the files.
_last_pieces: tuple[Any, ...] = ()
_last_files: tuple[Any, ...] = ()


def _pieces_of_one_process(entries: Sequence[Entry], shards: Sequence[LocalShard], most: int | None) -> Sequence[Piece]:
    global _last_pieces
    last = _last_pieces
    if last and last[0] is shards and last[1] == most:
        return last[2]
    pieces = assignment.pieces(entries, shards, None, 0)
    if most:
        pieces = assignment.cut(entries, pieces, most)
    _last_pieces = shards, most, pieces
    return pieces


def _planned_files(
    entries: Sequence[Entry], pieces: Sequence[Piece], order: Sequence[int], groups: Sequence[int], most: int | None
) -> tuple[Sequence[Piece], Sequence[PlannedFile]]:
    global _last_files
    last = _last_files
    if last and last[0] is pieces and last[1:4] == (order, groups, most):
        return last[4]
    to_write = pieces if order == range(len(pieces)) else [pieces[n] for n in order]
    found = to_write, layout.plan_groups(entries, to_write, groups, most)
    _last_files = pieces, order, groups, most, found
    return found
