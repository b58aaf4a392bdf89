"""Writing the native format."""

import bisect
import datetime
import itertools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ..._collector import paused
from ..._crew import Crew
from ..._leaves import Content
from ..._snapshot import Feed
from ..._tree import Skeleton
from ...stores.buffers import aligned, round_up
from ...stores.disk import Disk
from ...stores.local import Transaction
from . import layout, manifest
from .layout import ArrayFile
from .manifest import BLOCK

CHUNK = 4 * BLOCK  # what one thread copies, hashes and writes at a time
_SMALL = 64 << 10  # bytes of a piece on average, below which handling it costs more than copying it
_NOTHING = np.zeros(0, np.uint8)


class Info(NamedTuple):
    """What a save records beside the tree."""

    step: int | None
    metrics: dict[str, float | str]
    metadata: msgspec.Raw | None
    software: dict[str, str]


def write(
    disk: Disk, path: str, tree: Skeleton, content: Content, feed: Feed, info: Info, crew: Crew, overwrite: bool
) -> int:
    """Writes a checkpoint durably and commits it; returns its size in bytes. Leaves nothing behind when it fails."""
    transaction = Transaction(disk, path, overwrite=overwrite, named=manifest.file_names)
    try:
        with paused():
            files = layout.plan(content, transaction.token)
        listed = [_write_file(disk, transaction, file, content, feed, crew) for file in files]
        with paused():
            leaves, layouts = layout.rows(content, files)
        data = manifest.encode(
            manifest.Manifest(
                format=manifest.FORMAT,
                version=manifest.VERSION,
                created=datetime.datetime.now(datetime.UTC).isoformat(),
                software=info.software,
                step=info.step,
                metrics=info.metrics,
                metadata=info.metadata,
                files=listed,
                layouts=layouts,
                tree=list(tree),
                leaves=leaves,
            )
        )
        transaction.commit(data)
    except BaseException:
        transaction.abort()
        raise
    return len(data) + sum(file.size for file in listed)


def _write_file(
    disk: Disk, transaction: Transaction, file: ArrayFile, content: Content, feed: Feed, crew: Crew
) -> manifest.File:
    fd = transaction.create(file.name)
    size = len(file.header) + file.nbytes
    disk.preallocate(fd, round_up(size))
    checksums = _write_buffer(disk, fd, file, content, feed, crew)
    header = layout.fill_checksums(file.header, checksums)
    buffer = aligned(len(header))
    buffer[: len(header)] = header
    disk.write(fd, buffer, 0)
    disk.truncate(fd, size)
    disk.sync(fd)
    return manifest.File(file.name, size, len(header), manifest.xxh3(header))


def _write_buffer(disk: Disk, fd: int, file: ArrayFile, content: Content, feed: Feed, crew: Crew) -> Sequence[str]:
    """Fills, hashes and writes the buffer chunk by chunk in all threads; returns the checksum of every block."""
    checksums = [""] * file.blocks
    chunks = iter(range(0, file.nbytes, CHUNK))
    turn = threading.Lock()

    def work() -> None:
        buffer = aligned(min(CHUNK, file.nbytes))
        target = np.frombuffer(buffer, np.uint8)
        try:
            while True:
                with turn:
                    begin = next(chunks, None)
                if begin is None:
                    return
                end = min(begin + CHUNK, file.nbytes)
                _fill(target, file, content, feed, begin, end)
                for block in range(begin, end, BLOCK):
                    checksums[block // BLOCK] = manifest.xxh3(target[block - begin : min(block + BLOCK, end) - begin])
                disk.write(fd, buffer[: round_up(end - begin)], len(file.header) + begin)
        except BaseException as error:
            feed.fail(error)  # the other threads stop at once
            raise

    if file.nbytes < _SMALL * len(file.begins):
        work()  # the interpreter is what is busy then, and several threads would only fight over it
    else:
        crew.run(work)
    return checksums


def _fill(target: np.ndarray, file: ArrayFile, content: Content, feed: Feed, begin: int, end: int) -> None:
    """Copies the bytes [begin, end) of the buffer from the pieces they belong to, many small ones at a time."""
    parts: list[np.ndarray] = []
    owners: list[int] = []
    at = begin

    def flush() -> None:
        nonlocal at
        if parts:
            stop = at + sum(map(len, parts))
            np.concatenate(parts, out=target[at - begin : stop - begin])
            at = stop
            for owner, part in zip(owners, parts, strict=True):
                feed.copied(owner, len(part))
            parts.clear()
            owners.clear()

    for n in itertools.count(bisect.bisect_right(file.begins, begin) - 1):
        piece_begin = file.begins[n]
        piece = file.first + n
        nbytes = content.pieces[piece].nbytes
        if not feed.ready(piece):
            flush()  # what is held must be let go before more is waited for
        source = feed.take(piece) if nbytes else _NOTHING
        if piece_begin < begin or piece_begin + nbytes > end:
            source = source[max(begin - piece_begin, 0) : end - piece_begin]
        parts.append(source)
        owners.append(piece)
        if piece_begin + nbytes >= end:
            break
    flush()
