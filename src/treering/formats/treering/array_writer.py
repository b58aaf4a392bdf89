"""Writes one array file: fills it chunk by chunk, hashes each block, and makes it durable."""

import bisect
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ..._processes.assignment import Piece
from ..._pytree.lazy_supply import ShardSupply
from ..._threads.pool import ThreadPool
from ...stores.buffers import aligned, round_up
from ...stores.store import FinishedFile
from . import layout, manifest
from .layout import PlannedFile
from .manifest import BLOCK
from .manifest_fields import File
from .stopwatch import Stopwatch

CHUNK_BYTES = 4 * BLOCK  # bytes that one thread copies, hashes and writes at a time
_SMALL_PIECE_BYTES = 64 << 10  # on average; the bookkeeping of smaller pieces takes longer than copying their bytes


class FileWriter(Protocol):
    """The methods that write an array file; see `Sink`."""

    def preallocate(self, nbytes: int) -> memoryview | None: ...
    def write(self, data: memoryview, offset: int) -> None: ...
    def finish(self, nbytes: int, *, read_only: bool = False, same_as: FinishedFile | None = None) -> None: ...


def write_file(
    sink: FileWriter,
    name: str,
    file: PlannedFile,
    pieces: Sequence[Piece],
    staging: ShardSupply,
    pool: ThreadPool,
    stopwatch: Stopwatch,
    find_same: Callable[[File, str], FinishedFile | None] | None = None,
) -> tuple[File, str]:
    """Writes a planned file. Returns its entry and the checksums of its blocks.

    pieces: those that `file.first` counts.
    find_same: returns a file of another checkpoint with the same bytes, by the entry and the checksums of the new one.
    """
    size = len(file.header) + file.nbytes
    room = sink.preallocate(round_up(size))
    checksums = _write_buffer(sink, room, file, pieces, staging, pool)
    header = layout.fill_checksums(file.header, checksums)
    buffer = aligned(len(header))
    buffer[: len(header)] = header
    sink.write(buffer, 0)
    stopwatch.lap("write")
    listed = File(name, size, len(header), manifest.xxh3(header))
    sink.finish(size, read_only=True, same_as=find_same(listed, checksums) if find_same else None)
    stopwatch.lap("sync")
    return listed, checksums


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
