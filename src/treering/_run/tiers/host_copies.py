"""Gives each array file of a step a second disk, in the background after its commit.

Then a lost host costs no step. During a save processes have already written second copies of what they hold in memory
(`_save.second_copies`). All other files are fetched here, once.
"""

import logging
import posixpath
from collections.abc import Sequence
from typing import Any

import msgspec

from ..._processes import coordinator
from ..._processes.calls import Call, error_watcher
from ...errors import TreeringError
from ...formats.treering import host_files, removal, summary
from ...formats.treering.host_files import Missing, complete_copies, missing_copies
from ...formats.treering.manifest_fields import File
from ..background_queue import BackgroundQueue
from .exchange import Exchange
from .local_tier import LocalTier, Report, decode, encode

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
