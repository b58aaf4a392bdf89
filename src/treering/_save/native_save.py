"""Saves in the native format, each process its own part.

A save is one object with three methods, called in this order by every process of the call:

| method | process 0 | its peers | the exchange at its end |
| --- | --- | --- | --- |
| `begin` | makes the temporary manifest, plans its files | see that, plan their files | a broadcast of the token |
| `write_files` | shares, writes and syncs its array files | do the same | none |
| `commit` | seals the manifest, and publishes it in one step | keep their files locked | a gathering of the files |

What holds at every moment, whatever crashes:

- A reader sees the old checkpoint or the new one. Only the link (or rename) of the manifest changes which.
- The manifest is published only after all array files and their names are durable: each process syncs its own before it
  reports them.
- The temporary manifest exists, and is locked by process 0, from before the first array file until the commit. So
  another program can tell files of this save from leftovers.
- A process removes its files only if no manifest names them. If the outcome of the commit is in doubt, they stay.
- The decision of process 0 is a value that all processes get. Once the new manifest may be in place, even a failure is
  such a value (`Committed.problem`): an error would make the peers remove files of the checkpoint.

Rejected: publishing by a barrier of all processes, because one that dies inside would leave the rest without an
outcome; a manifest for each process, because a reader would need all to see one; and writing under the final names
without a temporary manifest, because a leftover then looks like a file of a running save.
"""

import functools
import itertools
import logging
import posixpath
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import msgspec

from .._core.boxes import full_box
from .._core.calls import Call, raise_error_of_process_0
from .._core.source import Written
from .._processes import assignment
from .._processes.assignment import Piece
from .._pytree.lazy_supply import ShardSupply
from .._pytree.leaves import Catalogue
from .._threads.pool import ThreadPool
from .._threads.python_gc import gc_paused
from ..errors import SaveError, TreeringError
from ..formats.treering import host_files, ledger, manifest
from ..formats.treering.commit import Transaction
from ..formats.treering.ledger import WrittenFile
from ..formats.treering.manifest_fields import File, Published
from ..formats.treering.save_files import SaveFiles
from ..stores.nfs import refresh_dir_cache, wait_until
from ..stores.store import FinishedFile, Sink, Store
from . import array_files, layout, save_manifest, second_copies
from .array_files import FilePlan
from .layout import PlannedFile
from .room import Room
from .save_manifest import Job, ProcessReport, ReportedPart
from .second_copies import OptionalSink, PlannedCopy

_log = logging.getLogger("treering")
_PART_BYTES = 1 << 20  # of a manifest that is sent at a time; a message may have four times as many


class Committed(NamedTuple):
    """The decision of process 0 about a save, which all processes get.

    nbytes: the size of the checkpoint.
    manifest_bytes: the size of the manifest.
    differing: the second copies that differ from the files that they copy.
    problem: why the manifest is perhaps not durable or not in place; None if the save has succeeded.
    identity: that of the checkpoint, if the save has `deltas`; else "".
    """

    nbytes: int
    manifest_bytes: int
    differing: list[str]
    problem: str | None
    identity: str


class NativeSave:
    """One save, as one process sees it. A second copy that cannot be written is logged and does not fail the save."""

    def __init__(self, store: Store, job: Job, supply: ShardSupply, pool: ThreadPool, call: Call):
        self._store, self._job, self._supply, self._pool, self._call = store, job, supply, pool, call
        self._room = Room(store, call, job.room_maker, job.info.step, supply.check)
        self._files: SaveFiles | None = None
        self._plan: FilePlan
        self._spread: Collection[int]  # leaves with several pieces
        self._copies: Sequence[PlannedCopy] = ()
        self._names: Sequence[str] = ()
        self._written: list[WrittenFile] = []
        self._copied: list[File] = []
        self._sinks: dict[str, Sink] = {}
        self._manifest = b""  # in process 0, once it is sealed
        self._is_complete = True  # in process 0, False for a checkpoint with differences
        self._published: Published | None = None  # in process 0
        self._doubt: SaveError | None = None  # in process 0, the error that is `Committed.problem`
        self._sync_seconds = 0.0

    def run(self) -> Written:
        """Saves. Returns the size and the times.

        A process that fails removes its files. If the commit of process 0 is in doubt, it keeps them: the next
        `collect_garbage` removes them if no manifest names them.
        """
        try:
            self.begin()
            began = time.perf_counter()
            self.write_files()
            written_at = time.perf_counter()
            outcome = self.commit()
            committed_at = time.perf_counter()
        except BaseException as error:
            self._abort(error)
            raise
        if outcome.problem:
            # Without the error: the peers have got it together with the commit, and keep their files.
            self._call.close()
            raise self._doubt or SaveError(outcome.problem)
        if reuse := self._job.reuse:
            self._written = [self._with_version(one) for one in self._written]
            reuse.committed(self._written)
        if deltas := self._job.deltas:
            deltas.committed(outcome.identity, self._is_complete)
        shared_bytes = sum([one.shared_bytes for one in self._written])
        write_seconds = written_at - began - self._sync_seconds
        changed = self._published and self._published.share
        return Written(
            outcome.nbytes, write_seconds, self._sync_seconds, committed_at - written_at, shared_bytes, changed
        )

    def _with_version(self, file: WrittenFile) -> WrittenFile:
        """Returns a file with the answer of the store to it; see `Sink.stored`."""
        if file.is_reused or (stored := self._sinks[file.listed.name].stored) is None:
            return file
        return file._replace(version=stored.version, shared_bytes=file.listed.size if stored.is_copy else 0)

    def begin(self) -> None:
        """Begins the save in process 0, joins it in its peers, and plans the files of this process."""
        store, job, call = self._store, self._job, self._call
        call.set_activity("planning")
        token, made, bases = call.broadcast(self._make_transaction)
        self._room.decides = False
        retry = self._room.retry
        if self._files is None and job.hosts:
            self._files = SaveFiles.join_per_host(store, job.path, token, retry)
        elif self._files is None:
            self._files = SaveFiles.join(
                store, job.path, token, made, timeout=call.timeout, check=call.check, retry=retry
            )
        with gc_paused():
            self._make_plan(token, bases)

    def _make_transaction(self) -> list[Any]:
        job = self._job
        files = Transaction(self._store, job.path, overwrite=job.overwrite, retry=self._room.retry)
        self._files = files
        return [files.token, files.made, job.reuse and job.reuse.find_bases()]

    def _make_plan(self, token: str, bases: Any) -> None:
        job, supply, call, max_file_bytes = self._job, self._supply, self._call, self._store.object_bytes
        own = job.own
        entries, shares = (own.entries, own.shares) if own else (job.catalogue.entries, job.shares)
        if shares and max_file_bytes and not own:
            shares = assignment.cut_assignments(entries, shares, max_file_bytes)
            self._job = job._replace(shares=shares)
        plan = array_files.plan_files(entries, supply, shares, call.index, max_file_bytes, job.reuse, bases)
        if shares is not None:
            self._copies = second_copies.plan(entries, supply.shards, shares, call.index, call.count, token)
        if shares is not None or plan.is_reordered or (job.reuse and job.reuse.deferred):
            taken = [*plan.to_write, *itertools.chain(*(copy.pieces for copy in self._copies))]
            supply.plan_reads([piece.shard for piece in taken], [piece.nbytes for piece in taken])
        self._plan = plan
        alone = max_file_bytes and shares is None
        self._spread = _spread(job.catalogue, plan.pieces) if alone else job.catalogue.shardings
        self._names = layout.names(token, len(plan.shared) + len(plan.files), call.index, call.count)

    def write_files(self) -> None:
        """Shares, writes and syncs the array files of this process."""
        assert self._files
        plan, supply = self._plan, self._supply
        self._call.set_activity("writing")
        shared = zip(self._names, plan.shared, strict=False)
        self._written = [ledger.link_or_copy(self._files, name, one) for name, one in shared]
        if plan.shared:
            supply.on_progress(sum(one.listed.size - one.listed.header for one in self._written))
        for name, file in zip(self._names[len(plan.shared) :], plan.files, strict=True):
            same = self._same_file(file) if self._job.reuse else None
            self._written.append(ledger.link_or_copy(self._files, name, same) if same else self._write_file(name, file))
        for copy in self._copies:
            self._write_copy(copy)
        if self._call.index:  # Process 0 syncs the names in its folder with the commit.
            begun = time.perf_counter()
            self._store.settle(self._job.path)
            self._sync_seconds += time.perf_counter() - begun

    def _same_file(self, file: PlannedFile) -> WrittenFile | None:
        """Returns a file of an earlier step with the same bytes as a file to write, if there probably is one."""
        plan, reuse = self._plan, self._job.reuse
        if reuse is None or file.first + len(file.begins) > plan.compare_first:
            return None
        found = reuse.same_layout(file, plan.numbers_in(file))
        if found is None or array_files.has_same_bytes(found, file, plan.to_write, self._supply, self._pool):
            return found
        if found.held:
            found.held.close()
        return None

    def _write_file(self, name: str, file: PlannedFile) -> WrittenFile:
        assert self._files
        plan, reuse = self._plan, self._job.reuse
        sink = self._sinks[name] = self._files.create(name)
        listed, checksums = array_files.fill_file(sink, name, file, plan.to_write, self._supply, self._pool)
        same_as: FinishedFile | None = reuse.same_content(listed, checksums) if reuse else None
        begun = time.perf_counter()
        sink.finish(listed.size, read_only=True, same_as=same_as)
        self._sync_seconds += time.perf_counter() - begun
        begins = *file.begins, file.nbytes
        return WrittenFile(self._job.path, listed, None, checksums, plan.numbers_in(file), begins)

    def _write_copy(self, copy: PlannedCopy) -> None:
        assert self._files
        sink = OptionalSink(self._files, copy.name)
        listed, _ = array_files.fill_file(sink, copy.name, copy.file, copy.pieces, self._supply, self._pool)
        begun = time.perf_counter()
        sink.finish(listed.size)
        self._sync_seconds += time.perf_counter() - begun
        if sink.end():
            self._copied.append(listed)

    def commit(self) -> Committed:
        """Reports the files of this process to process 0, which commits. Returns the decision."""
        files, job, call = self._files, self._job, self._call
        assert files
        call.set_activity("waiting for the commit")
        firsts = itertools.accumulate((len(one.numbers) for one in self._written), initial=0)
        written = [(one.listed, first) for one, first in zip(self._written, firsts, strict=False)]
        report = ProcessReport(written, self._copied, self._plan.runs, self._parts())
        outcome = Committed(*self._room.gather_and_decide(msgspec.to_builtins(report), self._publish))
        try:
            if job.hosts:  # The locks protect the arrays until the manifest names them on every disk.
                self._share_manifest(outcome.manifest_bytes)
                files.unmark()
            if self._copied:
                second_copies.remove(files, {file.name for file in self._copied}.intersection(outcome.differing))
        finally:
            files.close()
        return outcome

    def _parts(self) -> list[ReportedPart]:
        encoded, own = self._job.encoded, self._job.own
        if not encoded or not own:
            return []
        first, found = 0, list[ReportedPart]()
        for file, one in enumerate(self._written):
            for piece in self._plan.pieces[first : first + len(one.numbers)]:
                delta = encoded.differences.get(piece.leaf)
                found.append(ReportedPart(*own.leaves[piece.leaf], file, delta and delta[1]))
            first += len(one.numbers)
        return found

    def _publish(self, messages: Sequence[Any]) -> list[Any]:
        """Seals the manifest of the files that all processes report, and publishes it. Called in process 0."""
        files, job = self._files, self._job
        assert isinstance(files, Transaction)
        reports = [msgspec.convert(message, ProcessReport) for message in messages]
        listed, copies = [report.listed for report in reports], [report.copies for report in reports]
        differences = save_manifest.arrays_with_differences(job, reports)
        self._is_complete = not differences
        self._published = save_manifest.published(job, differences) if job.deltas else None
        self._manifest = data = save_manifest.seal(
            job, self._plan.pieces, self._spread, reports, differences, self._published
        )
        check: Callable[[], None] | None = None
        if any(listed[1:]) and not job.hosts:
            check = functools.partial(_check_visible, self._store, job.path, listed[1:], self._call.timeout)
        try:
            files.commit(data, check)
        except SaveError as error:
            if not files.must_stay:
                raise
            self._doubt = error
        nbytes = len(data) + sum(file.size for report in listed for file in report)
        differing = second_copies.differing_copies(listed, copies) if any(copies) else []
        identity = manifest.xxh3(data) if job.deltas else ""
        return list(Committed(nbytes, len(data), differing, self._doubt and str(self._doubt), identity))

    def _share_manifest(self, nbytes: int) -> None:
        """Sends the manifest that process 0 has committed to the other disks. A disk that misses it gets it later."""
        path, call, data = self._job.path, self._call, self._manifest
        try:
            parts = [
                call.broadcast(lambda begin=begin: data[begin : begin + _PART_BYTES].decode("latin-1"))
                for begin in range(0, nbytes, _PART_BYTES)
            ]
            if call.index:
                host_files.adopt_manifest(self._store, path, "".join(parts).encode("latin-1"))
        except (TreeringError, OSError) as error:
            _log.warning("%s: the manifest is not on the disk of this host yet: %s", path, error)

    def _abort(self, error: BaseException) -> None:
        """Removes the files of this process, unless they belong to a checkpoint or may belong to one.

        Raises the error of process 0 instead of `error` if it is the cause.
        """
        files, call = self._files, self._call
        if files and call.in_doubt:
            files.close()
        elif files:
            files.abort()
            if files.must_stay:
                call.close()  # without the error, or the other processes would remove their files of the checkpoint
        if isinstance(error, SaveError | FileNotFoundError):
            call.check()  # If process 0 has failed and removed the directory, its error is the cause.
        if isinstance(error, FileNotFoundError):
            raise_error_of_process_0(call)


def _spread(catalogue: Catalogue, pieces: Sequence[Piece]) -> set[int]:
    """Returns the leaves that are sharded over devices or cut into several pieces."""
    found = set(catalogue.shardings)
    for piece in pieces:
        entry: Any = catalogue.entries[piece.leaf]
        if piece.leaf not in found and piece.box != full_box(entry.shape):
            found.add(piece.leaf)
    return found


def _check_visible(store: Store, path: str, listed: Sequence[Sequence[File]], timeout: float) -> None:
    """Waits until process 0 sees the files of the others; over a network that may take a while. Raises `SaveError`."""
    found: dict[str, int | None] = {}

    def is_there(file: File) -> bool:
        there = store.stat(posixpath.join(path, file.name))
        found[file.name] = there and there.nbytes
        return found[file.name] == file.size

    with store.glance(path):
        missing = [(process, file) for process, files in enumerate(listed, 1) for file in files if not is_there(file)]
    for process, file in missing:
        if not wait_until(functools.partial(is_there, file), lambda: refresh_dir_cache(store, path), timeout):
            raise SaveError(
                f"{posixpath.join(path, file.name)}: expected {file.size} bytes written by process {process}, found "
                f"{found[file.name] or 'nothing'}; do all processes see the same file system?"
            )
