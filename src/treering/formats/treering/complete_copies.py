"""Completes the second copies of array files after the commit, where each host has a disk of its own.

`missing_copies` says which files lack a copy, also in a job that continues the run on other hosts. `complete_copies`
fetches them. Both can be interrupted and repeated.
"""

import bisect
import logging
import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...errors import CorruptError, TreeringError
from ...stores.buffers import aligned
from ...stores.store import Store
from . import host_files, manifest, removal
from .array_header import ArrayHeader
from .manifest import BLOCK
from .manifest_fields import File

# Fills a buffer from an offset of a file of a step that another process has on its disk: process, file name, offset.
Fetch = Callable[[int, str, int, memoryview], None]
_CHUNK_BYTES = 4 * BLOCK  # bytes that are fetched, verified and written at a time
_log = logging.getLogger("treering")


class Missing(NamedTuple):
    """A file that a process is to fetch, and the first process of a host whose disk has it."""

    file: File
    source: int


def missing_copies(
    files: Sequence[File], disks: Mapping[int, Mapping[str, int]], hosts: Sequence[int]
) -> dict[int, list[Missing]]:
    """Returns what each process is to fetch, by process, so that two disks have each of the files of a step.

    hosts: for each process, the lowest process that shares its disk. disks: the sizes in bytes of the files that each
        disk has, by that process. A file that no disk has in full is left out: it is lost here.

    A copy goes to the next disk in a ring. The processes of a disk share the work.
    """
    processes: dict[int, list[int]] = {}
    for process, disk in enumerate(hosts):
        processes.setdefault(disk, []).append(process)
    ring = sorted(processes)
    received = [0] * len(hosts)
    found: dict[int, list[Missing]] = {}
    for file in files:
        here = [disk for disk in ring if disks.get(disk, {}).get(file.name) == file.size]
        if len(here) != 1 or len(ring) < 2:
            continue
        to = ring[bisect.bisect_right(ring, here[0]) % len(ring)]
        target = min(processes[to], key=received.__getitem__)
        received[target] += file.size
        found.setdefault(target, []).append(Missing(file, processes[here[0]][0]))
    return found


def complete_copies(
    store: Store,
    path: str,
    identity: str,
    missing: Sequence[Missing],
    fetch: Fetch,
    check: Callable[[], None] = lambda: None,
) -> list[str]:
    """Fetches files of the committed step at a path to this disk. Returns the names of those that it has now, durably.

    A file gets its name only when every block is verified. A file that cannot be fetched is logged and left out.

    identity: that of the manifest, which this disk must have, or the files would be taken for leftovers.
    check: called before every request. An error that it raises ends the transfer.
    """
    stopped: list[BaseException] = []

    def fetch_checked(one: Missing, offset: int, into: memoryview) -> None:
        try:
            check()
        except BaseException as error:
            stopped.append(error)
            raise
        fetch(one.source, one.file.name, offset, into)

    found: list[str] = []
    if missing and host_files.identity(store, path) != identity:
        _log.warning("%s: no second copies are fetched: this disk lacks the manifest", path)
        return []
    if missing:
        removal.remove_temporaries(store, path, store.list(path))
    for one in missing:
        try:
            there = store.stat(posixpath.join(path, one.file.name))
            if there is None or there.nbytes != one.file.size:
                _receive(store, path, one, fetch_checked)
            found.append(one.file.name)
        except (TreeringError, OSError) as error:
            if error in stopped:
                raise
            _log.warning(
                "%s: the second copy of %s cannot be fetched from process %d now: %s",
                path, one.file.name, one.source, error,
            )  # fmt: skip
    return found


def _receive(store: Store, path: str, one: Missing, fetch: Callable[[Missing, int, memoryview], None]) -> None:
    file, place = one.file, posixpath.join(path, one.file.name)

    def read(offset: int, into: memoryview, expected: Sequence[str], part_bytes: int) -> None:
        """Fills a buffer whose parts have these checksums. Fetches a part that arrives damaged once more."""
        fetch(one, offset, into)
        for n, checksum in enumerate(expected):
            part = into[n * part_bytes : (n + 1) * part_bytes]
            if manifest.xxh3(part) != checksum:
                fetch(one, offset + n * part_bytes, part)
                if manifest.xxh3(part) != checksum:
                    raise CorruptError(
                        f"{place}: expected the bytes that were saved, found others at offset {offset + n * part_bytes}"
                        f" on the disk of process {one.source}"
                    )

    header = bytearray(file.header)
    read(0, memoryview(header), [file.xxh3], len(header))
    checksums = ArrayHeader(header, file.size, place).checksums
    buffer = aligned(_CHUNK_BYTES)
    with store.new_file(place, overwrite=True) as new:
        new.write(memoryview(header))
        for begin in range(0, file.size - file.header, _CHUNK_BYTES):
            chunk = buffer[: min(_CHUNK_BYTES, file.size - file.header - begin)]
            blocks = range(begin // BLOCK, -(-(begin + len(chunk)) // BLOCK))
            read(file.header + begin, chunk, [checksums[16 * n : 16 * n + 16] for n in blocks], BLOCK)
            new.write(chunk)
