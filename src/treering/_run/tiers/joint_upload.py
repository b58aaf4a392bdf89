"""One step is uploaded from the disks of all hosts: each sends its own array files, and process 0 commits."""

import os
import posixpath
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from ... import stores
from ..._core.leaf_paths import join_names
from ..._processes.calls import Call, error_watcher
from ...errors import CorruptError, SaveError, TreeringError
from ...formats.treering import host_files
from ...formats.treering.copy import copy_local_files
from ...formats.treering.manifest_fields import File
from ...formats.treering.save_files import SaveFiles
from .local_tier import LocalTier

# Called with the bytes that are about to be sent, and a function that raises the errors of other processes.
Progress = Callable[[int, Callable[[], None]], None]


class JointUpload:
    """Process 0's side of an upload in which all hosts take part; see `formats.treering.copy.PeerHosts`."""

    def __init__(self, call: Call, path: str, to: str):
        self._call, self._name, self._to = call, posixpath.basename(path), to

    def copy(
        self,
        token: str,
        files: SaveFiles | None,
        here: Mapping[str, int],
        own: Callable[[Collection[str]], list[File]],
        commit: Callable[[Sequence[File]], None],
    ) -> None:
        made = None if files is None else [os.fsencode(folder).decode("latin-1") for folder in files.made]
        self._call.broadcast(lambda: [self._name, self._to, token, made])
        mine = self._call.gather_and_decide(here, _share)["0"]
        copied: list[File] = []
        problem: BaseException | None = None
        try:
            copied = own(mine)
        except (TreeringError, OSError) as error:
            problem = error

        def decide(reports: Sequence[Any]) -> bool:
            nonlocal problem
            failed = [report[1] for report in reports if report[1]]
            if failed and problem is None:
                damaged = all(kind == CorruptError.__name__ for kind, _ in failed)
                problem = (CorruptError if damaged else SaveError)(join_names(tuple(text for _, text in failed)))
            if problem is None:
                found = [msgspec.convert(one, File) for report, _ in reports for one in report]
                try:
                    commit([*copied, *found])
                except (TreeringError, OSError) as error:
                    problem = error
            return problem is None or (files is not None and files.must_stay)

        try:
            self._call.gather_and_decide([[], []], decide)
        except BaseException:
            if files is not None and files.must_stay:
                self._call.close()  # without the error, or the others would remove their files of what is committed
            raise
        if problem:
            raise problem


def take_part(
    call: Call,
    local: LocalTier | None,
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
    report: list[File] = []
    problem: list[str] = []
    keep = False
    look = error_watcher(call)
    here = host_files.sizes(local.store, local.path(name), token) if local else {}
    mine = call.gather_and_decide(here, only_process_0).get(str(index), [])
    try:
        if local is not None:
            try:
                if made is not None:
                    made = [os.fsdecode(folder.encode("latin-1")) for folder in made]
                    files = SaveFiles.join(stores.get(to), to, token, made, timeout=call.timeout, check=call.check)
                path = local.path(name)
                report = copy_local_files(
                    local.store, path, mine, files, on_progress=lambda nbytes: on_progress(nbytes, look)
                )
            except (TreeringError, OSError) as error:
                call.check()  # Raises the error of process 0, if that is the cause.
                problem = [type(error).__name__, f"process {index}: {error}"]
        keep = call.gather_and_decide([msgspec.to_builtins(report), problem], only_process_0)
    finally:
        if files and (keep or call.in_doubt or not files.store.has_locks):
            files.close()  # Do not delete them: they may be committed, or another job's.
        elif files:
            files.abort()


def _share(disks: Sequence[Mapping[str, int]]) -> dict[str, list[str]]:
    """Assigns each file to one of the processes whose disks have it in full, so that all send about as much.

    disks: by process, the names and sizes of the files that it reports. Returns the names by process.
    """
    sizes: dict[str, int] = {}
    for own in disks:
        for name, nbytes in own.items():
            sizes[name] = max(nbytes, sizes.get(name, 0))
    sent = [0] * len(disks)
    found: dict[str, list[str]] = {str(process): [] for process in range(len(disks))}
    for name, nbytes in sorted(sizes.items()):
        holders = [process for process, own in enumerate(disks) if own.get(name) == nbytes]
        process = min(holders, key=sent.__getitem__)
        sent[process] += nbytes
        found[str(process)].append(name)
    return found


def only_process_0(*_: Any) -> Any:
    """Stands for the decision in processes that do not decide."""
    raise AssertionError("process 0 decides")
