"""Gives each array file of a step a second disk, in the background after its commit.

Then a lost host costs no step. During a save processes have already written second copies of what they hold in memory
(`_save.second_copies`). All other files are fetched here, once.
"""

import bisect
import logging
import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..._core.calls import Call, error_watcher
from ..._processes import coordinator
from ...errors import CorruptError, TreeringError
from ...formats.treering import host_files, manifest, removal, summary
from ...formats.treering.array_file import ArrayHeader
from ...formats.treering.manifest import BLOCK
from ...formats.treering.manifest_fields import File
from ...stores.buffers import aligned
from ...stores.store import Store
from ..background_queue import BackgroundQueue
from .exchange import Exchange
from .local_tier import LocalTier, Report, decode, encode

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


_log = logging.getLogger("treering")


class _Job(msgspec.Struct, frozen=True, array_like=True):
    """The files of a step that processes are to fetch: by process, the files and the processes that serve them.

    manifest_bytes: the size of the manifest. without_manifest: the processes that lead those hosts whose disks lack it.
    """

    name: str
    identity: str
    missing: dict[str, list[tuple[File, int]]]
    manifest_bytes: int
    without_manifest: list[int]


class HostCopies:
    """Copies the steps of a run to second disks. Every process of the job calls `begin` in the same order.

    hosts: for each process, the lowest process that shares its disk. It serves the files.
    """

    def __init__(self, local: LocalTier, exchange: Exchange, hosts: Sequence[int], run: str, timeout: float):
        self._local, self._exchange, self._hosts = local, exchange, tuple(hosts)
        self._run, self._timeout = run, timeout
        self._queue = BackgroundQueue()
        self._safe: set[tuple[str, str]] = set()  # in process 0, the names and identities of steps on two disks

    def is_safe(self, path: str) -> bool:
        """Returns True if each file of a step was found on two disks. Only process 0 knows it."""
        return (posixpath.basename(path), host_files.identity(self._local.store, path)) in self._safe

    def begin(self, after: str) -> None:
        """Begins to copy what lacks a second copy."""
        what = f"{self._run}: copying to second disks after {after}"
        self._queue.add(what, lambda: self._copy(what))

    def wait(self) -> None:
        """Waits until the copies that have begun are made, or have failed."""
        self._queue.wait()

    def _copy(self, what: str) -> None:
        index = 0
        try:
            call = coordinator.begin_call(what, timeout=self._timeout)
            index = call.index
            with coordinator.ending_call(call):
                call.set_activity("copying steps to second disks")
                jobs = [decode(job, _Job) for job in call.gather_and_decide(self._report(index), self._plan)]
                if any(job.without_manifest for job in jobs):  # The disk of a host that has joined the job lacks them.
                    for job in jobs:
                        self._fetch_manifest(job, index)
                    call.gather_and_decide(None, lambda _: None)  # A host may have several processes.
                for job in jobs:
                    self._fetch(job, call)
                call.gather_and_decide(None, lambda _: None)  # Each process of a host has fetched its files.
                call.gather_and_decide(self._report(index), self._plan)
                call.close()
        except (TreeringError, OSError) as error:
            (_log.info if index else _log.error)("%s failed; it is tried again with the next save: %s", what, error)

    def _report(self, index: int) -> Any:
        return encode(self._local.report()) if self._hosts[index] == index else None

    def _plan(self, reports: Sequence[Any]) -> list[Any]:
        """Returns the files that lack a second copy, in process 0, and notes the steps that lack none."""
        disks = {process: decode(one, Report).steps for process, one in enumerate(reports) if one}
        jobs: list[_Job] = []
        safe: set[tuple[str, str]] = set()
        for name in sorted(self._local.folders(), reverse=True):  # the newest first
            store, path = self._local.store, self._local.path(name)
            identity, files = host_files.identity(store, path), host_files.listed_files(store, path)
            if not identity or files is None:
                continue
            there = {process: own[name].sizes for process, own in disks.items() if name in own}
            if found := missing_copies(files, there, self._hosts):
                there_too = {process for process, own in disks.items() if name in own and own[name].identity}
                without_manifest = {self._hosts[process] for process in found} - there_too
                missing = {str(n): [(one.file, one.source) for one in own] for n, own in found.items()}
                jobs.append(_Job(name, identity, missing, self._manifest_bytes(path), sorted(without_manifest)))
                continue
            manifests = sum(own[name].identity == identity for own in disks.values() if name in own)
            copies = [sum(own.get(file.name) == file.size for own in there.values()) for file in files]
            if min([manifests, *copies]) > 1:
                safe.add((name, identity))
        for name, _ in sorted(safe - self._safe):
            _log.info("%s: each file of %s is on two disks", self._run, name)
        self._safe = safe
        return [encode(job) for job in jobs]

    def _manifest_bytes(self, path: str) -> int:
        found = summary.stat_manifest(self._local.store, path)
        return found.nbytes if found else 0

    def _fetch_manifest(self, job: _Job, index: int) -> None:
        """Fetches the manifest from process 0, unless that has deleted the step meanwhile."""
        if index in job.without_manifest:
            with removal.logging_errors(self._local.path(job.name)):
                self._local.complete(
                    job.name, lambda: self._exchange.manifest(job.name, job.identity, job.manifest_bytes)
                )

    def _fetch(self, job: _Job, call: Call) -> None:
        path = self._local.path(job.name)

        def fetch(process: int, file: str, offset: int, into: memoryview) -> None:
            self._exchange.peers.read_into(process, posixpath.basename(path), file, into, offset)

        missing = [Missing(*one) for one in job.missing.get(str(call.index), ())]
        look = error_watcher(call)
        complete_copies(self._local.store, path, job.identity, missing, fetch, look)
        call.check()
