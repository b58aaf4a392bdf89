"""Reads steps from the disks of all hosts of a job: each host gets what it lacks from the others over the network."""

import contextlib
import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from ..._core.calls import Call
from ..._processes import peer_files
from ...errors import PeerError
from ...formats.treering import host_files, manifest, summary
from ...stores.file_io import read_file
from ...stores.nearest_copy import HeldFile, NearestCopyStore
from ...stores.read_errors import READ_ATTEMPTS
from ...stores.store import Store
from .local_tier import LocalTier, Report, decode, encode


class Located(NamedTuple):
    """A step on the disks: its manifest, and the processes on whose hosts its array files are.

    remote: the path of the same step in the remote tier, which has the files that no disk has. "" if it is not needed,
        or if there is none.
    """

    manifest: bytes
    held: Mapping[str, HeldFile]
    remote: str

    @property
    def is_readable(self) -> bool:
        """True if some disk, or the remote tier, has each file."""
        return bool(self.remote) or all(one.holders for one in self.held.values())


class Exchange:
    """The steps that this process can read from the disks of all hosts. All processes make one together.

    remote: the store of the remote tier.
    hosts: for each process, the lowest process that shares its disk. It serves the files.
    """

    def __init__(self, local: LocalTier, remote: Store, call: Call, hosts: Sequence[int]):
        self.peers = peer_files.join(call, local.store, local.root, hosts[call.index])
        self._local, self._remote, self._serves = local, remote, hosts[call.index] == call.index
        self._located: dict[str, Located] = {}
        self._views: list[NearestCopyStore] = []

    def locate(self, call: Call, wanted: Callable[[], Mapping[str, str]], find_remote: Callable[[str], str]) -> None:
        """Finds which disk has which file of some steps. All processes call it before a restore.

        wanted: returns, in process 0, the names and identities of the steps, whose manifests are on its disk.
        find_remote: returns, in process 0, the path of the same step in the remote tier, or "" if that lacks it. It is
            called for steps that lack files. The other processes cannot compare the steps: they may lack the manifest.

        Raises `PeerError` if a manifest is deleted or replaced meanwhile.
        """

        def decide(reports: Sequence[Any]) -> dict[str, Any]:
            there = {n: decode(one, Report).steps for n, one in enumerate(reports) if one}
            return {name: self._find(name, identity, there, find_remote) for name, identity in wanted().items()}

        report = encode(self._local.report()) if self._serves else None
        found = call.gather_and_decide(report, decide)
        self._located = {
            name: Located(
                self.manifest(name, identity, nbytes), {file: HeldFile(*one) for file, one in held.items()}, remote
            )
            for name, (identity, nbytes, held, remote) in found.items()
        }

    def _find(
        self,
        name: str,
        identity: str,
        there: Mapping[int, Mapping[str, host_files.Inventory]],
        find_remote: Callable[[str], str],
    ) -> tuple[str, int, dict[str, HeldFile], str]:
        path = self._local.path(name)
        sizes = {process: own[name].sizes for process, own in there.items() if name in own}
        held = {
            file.name: HeldFile(
                file.size, [process for process, own in sizes.items() if own.get(file.name) == file.size]
            )
            for file in host_files.listed_files(self._local.store, path) or ()
        }
        found = summary.stat_manifest(self._local.store, path)
        remote = "" if all(one.holders for one in held.values()) else find_remote(name)
        return identity, found.nbytes if found else 0, held, remote

    def manifest(self, name: str, identity: str, nbytes: int) -> bytes:
        """Returns the manifest of a step on this disk, or that of process 0's disk if this one lacks it.

        Raises `PeerError` if that disk has another one, or none. It is no `NotFoundError`: a job may begin a new run
        after that, and the step exists.
        """
        path = self._local.path(name)
        if host_files.identity(self._local.store, path) == identity:
            return read_file(self._local.store, summary.manifest_path(path))
        data = bytearray(nbytes)
        for _ in range(READ_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError):
                self.peers.read_into(0, name, posixpath.basename(summary.manifest_path(path)), memoryview(data), 0)
                if manifest.xxh3(data) == identity:
                    return bytes(data)
        raise PeerError(
            f"{path}: expected the manifest from process 0, which lists this step, found another one or none; it was "
            "deleted or replaced meanwhile, or damaged on its way. Restore again"
        )

    def find(self, name: str) -> Located | None:
        """Returns a step that the last `locate` has found."""
        return self._located.get(name)

    def store(self, name: str) -> Store:
        """Returns a store that shows a located step at its path on this host."""
        one, path = self._located[name], self._local.path(name)
        small = {posixpath.basename(summary.manifest_path(path)): one.manifest}
        remote = (self._remote, one.remote) if one.remote else None
        view = NearestCopyStore(self.peers, self._local.store, path, small, one.held, remote)
        self._views.append(view)
        return cast(Store, view)

    def view(self, name: str, held: Mapping[str, HeldFile]) -> Store:
        """Returns a store that shows some array files of a step at its path on this host."""
        return cast(Store, NearestCopyStore(self.peers, self._local.store, self._local.path(name), {}, held))

    def end(self) -> None:
        """Logs what was read from where, and forgets what `locate` has found."""
        for view in self._views:
            if any(view.read_bytes.values()):
                view.log_reads()
        self._views.clear()
        self._located.clear()
