"""Reads steps from the disks of all hosts of a job: each host gets what it lacks from the others over the network."""

import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from ..._processes import peers
from ..._processes.calls import Call
from ...formats.treering import host_files, summary
from ...stores.file_io import read_file
from ...stores.nearest_copy import HeldFile, NearestCopyStore
from ...stores.store import Store
from .local_tier import LocalTier, Report, decode, encode


class Located(NamedTuple):
    """A step on the disks: its manifest, and the processes on whose hosts its array files are.

    is_complete: True if some disk has each file.
    """

    manifest: bytes
    held: Mapping[str, HeldFile]

    @property
    def is_complete(self) -> bool:
        return all(one.holders for one in self.held.values())


class Exchange:
    """The steps that this process can read from the disks of all hosts. All processes make one together.

    hosts: the process that serves the disk of each process.
    """

    def __init__(self, local: LocalTier, call: Call, hosts: Sequence[int]):
        self.peers = peers.join(call, local.store, local.root, hosts[call.index])
        self._local, self._serves = local, hosts[call.index] == call.index
        self._located: dict[str, Located] = {}
        self._views: list[NearestCopyStore] = []

    def locate(self, call: Call, wanted: Callable[[], Mapping[str, str]]) -> None:
        """Finds which disk has which file of some steps. All processes call it before a restore.

        wanted: returns, in process 0, the names and identities of the steps, whose manifests are on its disk.
        """

        def decide(reports: Sequence[Any]) -> dict[str, Any]:
            there = {n: decode(one, Report).steps for n, one in enumerate(reports) if one}
            return {name: self._find(name, identity, there) for name, identity in wanted().items()}

        report = encode(self._local.report()) if self._serves else None
        found = call.gather_and_decide(report, decide)
        self._located = {
            name: Located(self._manifest(name, identity, nbytes), {file: HeldFile(*one) for file, one in held.items()})
            for name, (identity, nbytes, held) in found.items()
        }

    def _find(
        self, name: str, identity: str, there: Mapping[int, Mapping[str, host_files.Inventory]]
    ) -> tuple[str, int, dict[str, HeldFile]]:
        path = self._local.path(name)
        sizes = {process: own[name].sizes for process, own in there.items() if name in own}
        held = {
            file.name: HeldFile(
                file.size, [process for process, own in sizes.items() if own.get(file.name) == file.size]
            )
            for file in host_files.listed_files(self._local.store, path) or ()
        }
        found = summary.stat_manifest(self._local.store, path)
        return identity, found.nbytes if found else 0, held

    def _manifest(self, name: str, identity: str, nbytes: int) -> bytes:
        """Returns the manifest of a step on this disk, or that of process 0's disk if this one lacks it."""
        path = self._local.path(name)
        if host_files.identity(self._local.store, path) == identity:
            return read_file(self._local.store, summary.manifest_path(path))
        data = bytearray(nbytes)
        self.peers.read_into(0, name, posixpath.basename(summary.manifest_path(path)), memoryview(data), 0)
        return bytes(data)

    def find(self, name: str) -> Located | None:
        """Returns a step that the last `locate` has found."""
        return self._located.get(name)

    def store(self, name: str, remote: tuple[Store, str] | None) -> Store:
        """Returns a store that shows a located step at its path on this host.

        remote: the store and the path of the same step in the remote tier, which is read last.
        """
        one, path = self._located[name], self._local.path(name)
        small = {posixpath.basename(summary.manifest_path(path)): one.manifest}
        view = NearestCopyStore(self.peers, self._local.store, path, small, one.held, remote)
        self._views.append(view)
        return cast(Store, view)

    def end(self) -> None:
        """Logs what was read from where, and forgets what `locate` has found."""
        for view in self._views:
            if any(view.read_bytes.values()):
                view.log_reads()
        self._views.clear()
        self._located.clear()
