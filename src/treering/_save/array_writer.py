"""Fills one array file chunk by chunk, hashes each block, and compares blocks with those of earlier files."""

import bisect
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .._processes.assignment import Piece
from .._pytree.lazy_supply import ShardSupply
from .._pytree.staged_supply import Bytes, StagedSupply
from .._threads.pool import ThreadPool
from ..formats.treering import ledger, manifest
from ..formats.treering.ledger import WrittenFile
from ..formats.treering.manifest import BLOCK
from ..formats.treering.manifest_fields import File
from ..stores.buffers import aligned, round_up
from . import layout
from .layout import PlannedFile

CHUNK_BYTES = 4 * BLOCK  # bytes that one thread copies, hashes and writes at a time
_SMALL_PIECE_BYTES = 64 << 10  # on average; the bookkeeping of smaller pieces takes longer than copying their bytes


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
