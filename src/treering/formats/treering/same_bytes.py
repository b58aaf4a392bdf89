"""Compares a planned array file with one of an earlier step, so that equal bytes are not written again."""

import bisect
import threading
from collections.abc import Sequence

import numpy as np

from ..._processes.assignment import Piece
from ..._pytree.lazy_supply import ShardSupply
from ..._pytree.staged_supply import Bytes, StagedSupply
from ..._threads.pool import ThreadPool
from . import manifest
from .layout import PlannedFile
from .manifest import BLOCK
from .shared_files import SharedFile, is_damaged


def has_same_bytes(
    shared: SharedFile, file: PlannedFile, pieces: Sequence[Piece], staging: ShardSupply, pool: ThreadPool
) -> bool:
    """Returns True if all blocks of a planned file have the checksums of another file, and that is not damaged.

    Stops at the first block that differs.

    Releases the staged bytes of an equal file, because they need not be written.

    pieces: those that `file.first` counts.
    """
    if not isinstance(staging, StagedSupply):
        return False
    checksums = shared.saved.checksums
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
    if differs.is_set() or (not shared.saved.is_own and is_damaged(shared.held)):
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
