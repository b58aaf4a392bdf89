"""Plans the array files of a process, which it shares with earlier steps or writes, and fills those that it writes."""

import bisect
import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from .._core.boxes import Box
from .._core.entries import Entry
from .._processes import assignment
from .._processes.assignment import Assignment, Piece
from .._pytree.lazy_supply import ShardSupply
from .._pytree.leaves import LocalShard
from .._pytree.staged_supply import Bytes, StagedSupply
from .._threads.pool import ThreadPool
from ..formats.treering import ledger, manifest
from ..formats.treering.ledger import WrittenFile
from ..formats.treering.manifest import BLOCK
from ..formats.treering.manifest_fields import File
from ..stores.buffers import aligned, round_up
from . import layout
from .layout import PlannedFile
from .save_reuse import SaveReuse

CHUNK_BYTES = 4 * BLOCK  # bytes that one thread copies, hashes and writes at a time
_SMALL_PIECE_BYTES = 64 << 10  # on average; the bookkeeping of smaller pieces takes longer than copying their bytes


class FilePlan(NamedTuple):
    """The array files of one process.

    shared: the files that the save shares with earlier steps.
    files: the files to write. `first` counts in `to_write`.
    to_write: the pieces in them, in order.
    pieces: the pieces in both, in order.
    numbers: for each of these, its number among the pieces of the process; see `assignment.pieces`.
    compare_first: how many pieces of `to_write`, the first ones, have probably not changed.
    is_reordered: True unless all pieces are written in the order of their numbers.
    """

    shared: Sequence[WrittenFile]
    files: Sequence[PlannedFile]
    to_write: Sequence[Piece]
    pieces: Sequence[Piece]
    numbers: Sequence[int]
    compare_first: int
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
    max_file_bytes: int | None,
    reuse: SaveReuse | None,
    bases: Any,
) -> FilePlan:
    """Returns the plan for process `index`, whose files have at most `max_file_bytes`.

    shares: the processes that write each array; None if this process writes all.
    bases: see `SaveReuse.find_bases`.
    """
    shards = staging.shards
    if shares is None:
        pieces = _pieces_of_one_process(entries, shards, max_file_bytes)
        groups: Sequence[int] = [len(pieces)]
    else:
        pieces = assignment.pieces(entries, shards, shares, index)
        groups = [len(sizes) for sizes in assignment.sizes_by_keeper(entries, shares, index).values()]
    by_shard = isinstance(staging, StagedSupply) and staging.is_limited
    chosen = reuse.choose(bases, entries, pieces, by_shard=by_shard) if reuse else None
    if chosen is None:
        files = _planned_files(entries, pieces, range(len(pieces)), groups, max_file_bytes)[1]
        return FilePlan((), files, pieces, pieces, range(len(pieces)), 0, False)
    to_write, files = _planned_files(entries, pieces, chosen.order, chosen.groups, max_file_bytes)
    shared = [n for one in chosen.shared for n in one.numbers]
    in_order = [*(pieces[n] for n in shared), *to_write]
    return FilePlan(chosen.shared, files, to_write, in_order, [*shared, *chosen.order], chosen.compare_first, True)


def in_order_of_files(sizes: assignment.Sizes, runs: Sequence[tuple[int, int]] | None) -> Iterable[tuple[int, Box]]:
    """Returns the leaf and the box of each piece of a process, in the order of its files; see `FilePlan.runs`."""
    found = [(leaf, box) for leaf, box, _ in sizes]
    return found if runs is None else itertools.chain(*(found[first:end] for first, end in runs))


# A training loop saves the same structure at every step. So the results of the last save are kept: the shards, and the
# pieces; these pieces with their order, and the files.
_last_pieces: tuple[Any, ...] = ()
_last_files: tuple[Any, ...] = ()


def _pieces_of_one_process(
    entries: Sequence[Entry], shards: Sequence[LocalShard], max_file_bytes: int | None
) -> Sequence[Piece]:
    global _last_pieces
    last = _last_pieces
    if last and last[0] is shards and last[1] == max_file_bytes:
        return last[2]
    pieces = assignment.pieces(entries, shards, None, 0)
    if max_file_bytes:
        pieces = assignment.cut(entries, pieces, max_file_bytes)
    _last_pieces = shards, max_file_bytes, pieces
    return pieces


def _planned_files(
    entries: Sequence[Entry],
    pieces: Sequence[Piece],
    order: Sequence[int],
    groups: Sequence[int],
    max_file_bytes: int | None,
) -> tuple[Sequence[Piece], Sequence[PlannedFile]]:
    global _last_files
    last = _last_files
    if last and last[0] is pieces and last[1:4] == (order, groups, max_file_bytes):
        return last[4]
    to_write = pieces if order == range(len(pieces)) else [pieces[n] for n in order]
    found = to_write, layout.plan_groups(entries, to_write, groups, max_file_bytes)
    _last_files = pieces, order, groups, max_file_bytes, found
    return found


class FileWriter(Protocol):
    """The methods of a `Sink` that fill an array file."""

    def preallocate(self, nbytes: int) -> memoryview | None: ...
    def write(self, data: memoryview, offset: int) -> None: ...


def fill_file(
    sink: FileWriter, name: str, file: PlannedFile, pieces: Sequence[Piece], staging: ShardSupply, pool: ThreadPool
) -> tuple[File, str]:
    """Writes the bytes of a planned file. Returns its entry in the manifest and the checksums of its blocks.

    The caller finishes the file.

    pieces: those that `file.first` counts.
    """
    size = len(file.header) + file.nbytes
    checksums = _write_buffer(sink, sink.preallocate(round_up(size)), file, pieces, staging, pool)
    header = layout.fill_checksums(file.header, checksums)
    buffer = aligned(len(header))
    buffer[: len(header)] = header
    sink.write(buffer, 0)
    return File(name, size, len(header), manifest.xxh3(header)), checksums


def _write_buffer(
    sink: FileWriter,
    room: memoryview | None,
    file: PlannedFile,
    pieces: Sequence[Piece],
    staging: ShardSupply,
    pool: ThreadPool,
) -> str:
    """Fills, hashes and writes the buffer chunk by chunk in all threads. Returns the checksum of every block.

    room: the sink's own memory for the file, or None. Chunks are filled there directly, without a copy.
    """
    checksums = [""] * file.blocks
    chunks = iter(range(0, file.nbytes, CHUNK_BYTES))
    turn = threading.Lock()

    def work() -> None:
        buffer = aligned(min(CHUNK_BYTES, file.nbytes)) if room is None else room[len(file.header) :]
        target = np.frombuffer(buffer, np.uint8)
        while True:
            with turn:
                begin = next(chunks, None)
            if begin is None:
                return
            end = min(begin + CHUNK_BYTES, file.nbytes)
            chunk = target if room is None else target[begin:end]
            _fill(chunk, file, pieces, staging, begin, end)
            for block in range(begin, end, BLOCK):
                checksums[block // BLOCK] = manifest.xxh3(chunk[block - begin : min(block + BLOCK, end) - begin])
            if room is None:
                sink.write(buffer[: round_up(end - begin)], len(file.header) + begin)
            staging.on_progress(end - begin)

    if file.nbytes < _SMALL_PIECE_BYTES * len(file.begins):
        work()  # Small pieces keep the interpreter busy, so several threads would only compete for its lock.
    else:
        pool.run(work, stop=staging.fail)  # An error stops the other threads at once, which may wait for staged bytes.
    return "".join(checksums)


def _fill(
    target: np.ndarray, file: PlannedFile, pieces: Sequence[Piece], staging: ShardSupply, begin: int, end: int
) -> None:
    """Copies the bytes [begin, end) of the buffer from their pieces, many small pieces at a time."""
    first = bisect.bisect_right(file.begins, begin) - 1
    last = bisect.bisect_left(file.begins, end, first + 1)
    left = [piece for piece in pieces[file.first + first : file.first + last] if piece.nbytes]
    skipped, at = begin - file.begins[first], 0
    while left:
        numbers = [piece.shard for piece in left]
        # `take` may return fewer shards than asked for: those that are staged now. Their memory is released below,
        # before this thread waits for the rest, because the rest may need that memory.
        parts = staging.take(numbers)
        chosen, left = left[: len(parts)], left[len(parts) :]
        for n, (piece, part) in enumerate(zip(chosen, parts, strict=True)):
            if len(part) != piece.nbytes:
                parts[n] = part[piece.begin : piece.begin + piece.nbytes]
        parts[0], skipped = parts[0][skipped:], 0
        stop = at + sum(map(len, parts))
        if stop > end - begin:
            parts[-1] = parts[-1][: end - begin - stop]
            stop = end - begin
        np.concatenate(parts, out=target[at:stop])
        staging.release_bytes(numbers[: len(parts)], list(map(len, parts)))
        at = stop


def has_same_bytes(
    shared: WrittenFile, file: PlannedFile, pieces: Sequence[Piece], staging: ShardSupply, pool: ThreadPool
) -> bool:
    """Returns True if all blocks of a planned file have the checksums of another file, and that is not damaged.

    Stops at the first block that differs.

    Releases the staged bytes of an equal file, because they need not be written.

    pieces: those that `file.first` counts.
    """
    if not isinstance(staging, StagedSupply):
        return False
    checksums = shared.checksums
    own = pieces[file.first : file.first + len(file.begins)]
    blocks = iter(range(file.blocks))
    turn = threading.Lock()
    differs = threading.Event()

    def work() -> None:
        while not differs.is_set():
            with turn:
                block = next(blocks, None)
            if block is None:
                return
            if manifest.xxh3(_block(block, file, own, staging)) != checksums[16 * block : 16 * block + 16]:
                differs.set()

    pool.run(work, stop=staging.fail)
    if differs.is_set() or ledger.is_damaged(shared):
        return False
    staging.on_progress(file.nbytes)
    staging.release_bytes([piece.shard for piece in own], [piece.nbytes for piece in own])
    return True


def _block(block: int, file: PlannedFile, pieces: Sequence[Piece], staging: StagedSupply) -> Bytes:
    """Returns the bytes of a block. They are not copied if one piece has all of them."""
    begin, end = block * BLOCK, min((block + 1) * BLOCK, file.nbytes)
    first = bisect.bisect_right(file.begins, begin) - 1
    last = bisect.bisect_left(file.begins, end, first + 1)
    parts: list[Bytes] = []
    for piece, start in zip(pieces[first:last], file.begins[first:last], strict=True):
        own = staging.take([piece.shard])[0][piece.begin : piece.begin + piece.nbytes]
        parts.append(own[max(begin - start, 0) : end - start])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
