"""One step is uploaded from the disks of all hosts: each sends its own array files, and process 0 commits."""

import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ... import stores
from ..._core.calls import Call, error_watcher
from ..._core.leaf_paths import join_names
from ...errors import CorruptError, SaveError, TreeringError
from ...formats.treering import host_files
from ...formats.treering.copy import copy_files
from ...formats.treering.manifest_fields import File
from ...formats.treering.save_files import SaveFiles
from ...stores.nearest_copy import HeldFile
from .exchange import Exchange
from .local_tier import LocalTier

# Called with the bytes that are about to be sent, and a function that raises the errors of other processes.
Progress = Callable[[int, Callable[[], None]], None]


class JointUpload:
    """Process 0's side of an upload in which all hosts take part; see `formats.treering.copy.PeerHosts`."""

    def __init__(self, call: Call, local: LocalTier, exchange: Exchange, path: str, to: str):
        self._call, self._local, self._exchange = call, local, exchange
        self._path, self._name, self._to = path, posixpath.basename(path), to

    def copy(
        self,
        token: str,
        files: SaveFiles | None,
        listed: Sequence[File],
        on_progress: Callable[[int], None],
        commit: Callable[[], None],
    ) -> None:
        made = None if files is None else files.made
        self._call.broadcast(lambda: [self._name, self._to, token, made])
        missing: list[str] = []

        def share(disks: Sequence[Mapping[str, int]]) -> dict[str, Any]:
            shares, lost = _share(listed, disks)
            missing.extend(lost)
            return {} if lost else {str(process): own for process, own in shares.items()}

        here = host_files.sizes(self._local.store, self._path, token)
        mine = self._call.gather_and_decide(here, share).get("0", ())
        problem: BaseException | None = None
        try:
            if missing:
                raise CorruptError(
                    f"{self._path}: expected its files on the disks of this job's hosts, as they were saved; missing: "
                    f"{join_names(tuple(missing))}"
                )
            _copy(self._local, self._exchange, self._name, mine, files, on_progress)
        except (TreeringError, OSError) as error:
            problem = error

        def decide(reports: Sequence[Any]) -> bool:
            nonlocal problem
            failed = [report for report in reports if report]
            if failed and problem is None:
                damaged = all(kind == CorruptError.__name__ for kind, _ in failed)
                problem = (CorruptError if damaged else SaveError)(join_names(tuple(text for _, text in failed)))
            if problem is None:
                try:
                    commit()
                except (TreeringError, OSError) as error:
                    problem = error
            return problem is None or (files is not None and files.must_stay)

        try:
            self._call.gather_and_decide([], decide)
        except BaseException:
            if files is not None and files.must_stay:
                self._call.close()  # without the error, or the others would remove their files of what is committed
            raise
        if problem:
            raise problem


def take_part(
    call: Call,
    local: LocalTier | None,
    exchange: Exchange,
    index: int,
    name: str,
    to: str,
    token: str,
    made: Sequence[str] | None,
    *,
    on_progress: Progress,
) -> None:
    """Uploads the files of a step that this host has, or only verifies them if `made` is None.

    local: None in processes that are not the leader of their host.
    """
    files: SaveFiles | None = None
    problem: list[str] = []
    keep = False
    look = error_watcher(call)
    here = host_files.sizes(local.store, local.path(name), token) if local else {}
    mine = call.gather_and_decide(here, only_process_0).get(str(index), ())
    try:
        if local is not None:
            try:
                if made is not None:
                    files = SaveFiles.join(stores.get(to), to, token, made, timeout=call.timeout, check=call.check)
                _copy(local, exchange, name, mine, files, lambda nbytes: on_progress(nbytes, look))
            except (TreeringError, OSError) as error:
                call.check()  # Raises the error of process 0, if that is the cause.
                problem = [type(error).__name__, f"process {index}: {error}"]
        keep = call.gather_and_decide(problem, only_process_0)
    finally:
        if files and (keep or call.in_doubt or not files.store.has_locks):
            files.close()  # Do not delete them: they may be committed, or another job's.
        elif files:
            files.abort()


def _copy(
    local: LocalTier,
    exchange: Exchange,
    name: str,
    mine: Sequence[Any],
    files: SaveFiles | None,
    on_progress: Callable[[int], None],
) -> None:
    """Copies the files of a share, as `_share` returns it. A file that is damaged here is read from another disk."""
    listed = [(msgspec.convert(file, File), holders) for file, holders in mine]
    source = exchange.view(name, {file.name: HeldFile(file.size, holders) for file, holders in listed})
    to_copy = [file for file, _ in listed]
    ledger = local.uploads if files and files.store.sharing == "copies" else None
    copy_files(source, local.path(name), to_copy, files, on_progress=on_progress, ledger=ledger)


def _share(
    listed: Sequence[File], disks: Sequence[Mapping[str, int]]
) -> tuple[dict[int, list[tuple[Any, list[int]]]], list[str]]:
    """Assigns each file to one of the processes whose disks have it in full, so that all send about as much.

    disks: by process, the names and sizes of the files that it reports.

    Returns the files by process, each with all processes whose disks have it, and the names of those that no disk has.
    """
    sent = [0] * len(disks)
    found: dict[int, list[tuple[Any, list[int]]]] = {}
    lost: list[str] = []
    for file in listed:
        holders = [process for process, own in enumerate(disks) if own.get(file.name) == file.size]
        if not holders:
            lost.append(file.name)
            continue
        process = min(holders, key=sent.__getitem__)
        sent[process] += file.size
        found.setdefault(process, []).append((msgspec.to_builtins(file), holders))
    return found, lost


def only_process_0(*_: Any) -> Any:
    """Stands for the decision in processes that do not decide."""
    raise AssertionError("process 0 decides")
