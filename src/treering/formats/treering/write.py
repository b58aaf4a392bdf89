"""Writes the native format."""

import contextlib
import datetime
import functools
import itertools
import logging
import posixpath
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..._core.boxes import Box, full_box
from ..._core.skeleton import Skeleton
from ..._core.source import Written
from ..._processes import assignment
from ..._processes.assignment import Assignment, Piece
from ..._processes.calls import Call, raise_error_of_process_0
from ..._pytree.lazy_supply import ShardSupply
from ..._pytree.leaves import Catalogue
from ..._threads.pool import ThreadPool
from ..._threads.python_gc import gc_paused
from ...errors import SaveError, TreeringError, UnsupportedError
from ...stores.nfs import refresh_dir_cache, wait_until
from ...stores.store import Store
from . import host_files, layout, manifest, second_copies
from .array_writer import write_file
from .commit import Transaction
from .layout import PlannedFile
from .manifest_fields import File, Layout, Manifest, Placement
from .room import PatientSink, Room, RoomMaker
from .same_bytes import has_same_bytes
from .save_files import SaveFiles
from .save_plan import SavePlan, in_order_of_files, plan_save
from .second_copies import PlannedCopy
from .shared_files import Reuse, SharedFile, WrittenFile, share, with_answer
from .stopwatch import Stopwatch

_log = logging.getLogger("treering")


class Info(NamedTuple):
    """The information that a save records together with the tree."""

    step: int | None
    metrics: dict[str, float | str]
    metadata: msgspec.Raw | None
    metadata_floats: list[str]
    software: dict[str, str]


class Job(NamedTuple):
    """The contents and the path of a save.

    `shares` names the processes that write each array. It is None if this process writes all of them. `hosts` has,
    for each process, the lowest process that shares its disk, if each host has a disk of its own at the path; else it
    is None. `room_maker` frees room if a disk is full. `reuse` finds arrays that earlier steps have; None writes all.
    """

    path: str
    overwrite: bool
    tree: Skeleton
    catalogue: Catalogue
    shares: Mapping[int, Assignment] | None
    info: Info
    hosts: tuple[int, ...] | None = None
    room_maker: RoomMaker | None = None
    reuse: Reuse | None = None


def write(store: Store, job: Job, staging: ShardSupply, pool: ThreadPool, call: Call) -> Written:
    """Writes a checkpoint durably, together with the other processes of the call.

    Process 0 begins and commits the save. A process that fails removes its files. If the commit of process 0 is in
    doubt, it keeps them: the next `collect_garbage` removes them if no manifest names them. A second copy that cannot
    be written is logged and does not fail the save.
    """
    files: Any = None
    stopwatch = Stopwatch()
    undurable: SaveError | None = None
    committed = b""  # the manifest, in process 0
    room = Room(call, job.room_maker, job.info.step, staging.check)

    def begin() -> list[Any]:
        nonlocal files
        files = room.retry(job.path, 0, lambda: Transaction(store, job.path, overwrite=job.overwrite))
        files.retry_when_full = room.retry
        return [files.token, files.made, job.reuse and job.reuse.find_bases()]

    def commit(reports: Sequence[Any]) -> list[Any]:
        nonlocal undurable, committed
        listed = [[msgspec.convert(one, File) for one, _ in report] for report, _, _ in reports]
        firsts = [[first for _, first in report] for report, _, _ in reports]
        copies = [[msgspec.convert(one, File) for one in report] for _, report, _ in reports]
        committed = data = _manifest(job, plan.pieces, spread, listed, firsts, [runs for _, _, runs in reports])
        try:
            others = [] if job.hosts else listed[1:]
            files.commit(data, lambda: _check_visible(store, job.path, others, call.timeout))
        except SaveError as error:
            if not files.must_stay:
                raise
            # The manifest is in place but perhaps not durable. Its files must stay, so the peers do not get this error
            # as a failure, which would make them remove theirs.
            undurable = error
        nbytes = len(data) + sum(file.size for report in listed for file in report)
        return [nbytes, undurable and str(undurable), len(data), second_copies.differing_copies(listed, copies)]

    try:
        call.set_activity("planning")
        token, made, bases = call.broadcast(lambda: room.decide(begin))
        if files is None and job.hosts:
            files = room.retry(job.path, 0, lambda: SaveFiles.join_per_host(store, job.path, token))
        elif files is None:
            files = SaveFiles.join(store, job.path, token, made, timeout=call.timeout, check=call.check)
        with gc_paused():
            entries, shares, most = job.catalogue.entries, job.shares, store.object_bytes
            copies: Sequence[PlannedCopy] = ()
            if shares and most:
                shares = assignment.cut_assignments(entries, shares, most)
                job = job._replace(shares=shares)
            plan = plan_save(entries, staging, shares, call.index, most, job.reuse, bases)
            if shares is not None:
                copies = second_copies.plan(entries, staging.shards, shares, call.index, call.count, token)
            if shares is not None or plan.is_reordered or (job.reuse and job.reuse.deferred):
                taken = [*plan.to_write, *itertools.chain(*(copy.pieces for copy in copies))]
                staging.plan_reads([piece.shard for piece in taken], [piece.nbytes for piece in taken])
            spread = _spread(job.catalogue, plan.pieces) if most else job.catalogue.shardings
            names = layout.names(token, len(plan.shared) + len(plan.files), call.index, call.count)
        call.set_activity("writing")
        stopwatch.begin()
        written = [share(files, name, one, room) for name, one in zip(names, plan.shared, strict=False)]
        staging.on_progress(sum(one.listed.size - one.listed.header for one in written))
        sinks: dict[str, PatientSink] = {}
        for name, file in zip(names[len(plan.shared) :], plan.files, strict=True):
            if same := _same_file(job.reuse, plan, file, staging, pool):
                written.append(share(files, name, same, room))
                continue
            stopwatch.lap("write")
            sink = sinks[name] = PatientSink(room, files, name)
            find_same = job.reuse.same_content if job.reuse else None
            listed, checksums = write_file(sink, name, file, plan.to_write, staging, pool, stopwatch, find_same)
            written.append(WrittenFile(listed, plan.numbers_in(file), (*file.begins, file.nbytes), checksums))
        stopwatch.lap("write")
        copied: list[File] = []
        for copy in copies:
            sink = second_copies.LenientSink(files, copy.name)
            file, _ = write_file(sink, copy.name, copy.file, copy.pieces, staging, pool, stopwatch)
            copied += [file] if sink.end() else []
        if call.index:
            store.settle(job.path)
        stopwatch.lap("sync")
        call.set_activity("waiting for the commit")
        firsts = itertools.accumulate((len(one.numbers) for one in written), initial=0)
        report = [(one.listed, first) for one, first in zip(written, firsts, strict=False)]
        message = msgspec.to_builtins([report, copied, plan.runs])
        nbytes, problem, manifest_bytes, differing = room.gather_and_decide(message, commit)
        try:
            if job.hosts:  # The locks protect the arrays until the manifest names them on every disk.
                host_files.share_manifest(store, job.path, call, committed, manifest_bytes)
                files.unmark()
            second_copies.remove(files, {file.name for file in copied}.intersection(differing))
        finally:
            files.close()
        stopwatch.lap("commit")
    except BaseException as error:
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
        raise
    if problem:
        call.close()  # Without the error: the peers have got it together with the commit, and keep their files.
        raise undurable or SaveError(problem)
    written = [one if one.is_reused else with_answer(one, sinks[one.listed.name].stored) for one in written]
    if job.reuse:
        job.reuse.committed(written)
    seconds, shared_bytes = stopwatch.seconds, sum(one.shared_bytes for one in written)
    return Written(nbytes, seconds["write"], seconds["sync"], seconds["commit"], shared_bytes)


def _same_file(
    reuse: Reuse | None, plan: SavePlan, file: PlannedFile, staging: ShardSupply, pool: ThreadPool
) -> SharedFile | None:
    """Returns a file of an earlier step with the same bytes as a file to write, if there probably is one."""
    if reuse is None or file.first + len(file.begins) > plan.likely:
        return None
    found = reuse.same_layout(file, plan.numbers_in(file))
    if found is None or has_same_bytes(found, file, plan.to_write, staging, pool):
        return found
    found.held.close()
    return None


def _manifest(
    job: Job,
    pieces: Sequence[Piece],
    spread: Collection[int],
    listed: Sequence[Sequence[File]],
    firsts: Sequence[Sequence[int]],
    runs: Sequence[Any],
) -> bytes:
    entries, everyone = job.catalogue.entries, job.shares

    def order(process: int) -> Iterable[tuple[int, Box]]:
        if everyone is None:
            return ((piece.leaf, piece.box) for piece in pieces)
        return in_order_of_files(assignment.piece_sizes(entries, everyone, process), runs[process])

    with gc_paused():
        by_leaf = assignment.assign_unshared(spread, pieces) if everyone is None else everyone
        rows = layout.rows(job.catalogue, by_leaf, layout.FileIndex(firsts, order))
        placement = layout.placement(job.catalogue)
    data = manifest.seal(
        Manifest(
            format=manifest.FORMAT,
            version=manifest.VERSION,
            created=datetime.datetime.now(datetime.UTC).isoformat(),
            software=job.info.software,
            step=job.info.step,
            metrics=job.info.metrics,
            metadata=job.info.metadata,
            metadata_floats=job.info.metadata_floats,
            files=[file for report in listed for file in report],
            layouts=rows.layouts,
            holders=rows.holders,
            placement=placement,
            static=job.catalogue.static,
            iterators=rows.iterators,
            tree=list(job.tree),
            leaves=rows.leaves,
        )
    )
    _check_readable(data, job, rows.layouts, placement)
    return data


def _spread(catalogue: Catalogue, pieces: Sequence[Piece]) -> set[int]:
    """Returns the leaves that are sharded over devices or cut into several pieces."""
    found = set(catalogue.shardings)
    for piece in pieces:
        entry: Any = catalogue.entries[piece.leaf]
        if piece.leaf not in found and piece.box != full_box(entry.shape):
            found.add(piece.leaf)
    return found


# The structure of the last manifest that passed `_check_readable`, without values
_last_read_back: tuple[Any, ...] = ()


def _check_readable(data: bytes, job: Job, layouts: Sequence[Layout], placement: Placement | None) -> None:
    """Reads a manifest before it is committed. Raises `UnsupportedError` for one that no reader would accept.

    A manifest with the structure of the last one is not read again: in a training loop only values differ from step to
    step.
    """
    global _last_read_back
    structure = (job.tree, layouts, placement, job.catalogue.static, job.info.metadata, job.info.metadata_floats)
    if _last_read_back and job.tree is _last_read_back[0] and structure[1:] == _last_read_back[1:]:
        return
    try:
        manifest.decode(data, "manifest")
    except TreeringError as error:
        raise UnsupportedError(
            f"{job.path}: expected a tree that can be read back, found one that makes an invalid manifest ({error}); "
            "nothing is written; please report this"
        ) from error
    _last_read_back = structure


def _check_visible(store: Store, path: str, listed: Sequence[Sequence[File]], timeout: float) -> None:
    """Waits until process 0 sees the files of the others; over a network that may take a while. Raises `SaveError`."""
    found: dict[str, int | None] = {}

    def is_there(file: File) -> bool:
        there = store.stat(posixpath.join(path, file.name))
        found[file.name] = there and there.nbytes
        return found[file.name] == file.size

    with store.glance(path) if any(listed) else contextlib.nullcontext():
        missing = [(process, file) for process, files in enumerate(listed, 1) for file in files if not is_there(file)]
    for process, file in missing:
        if not wait_until(functools.partial(is_there, file), lambda: refresh_dir_cache(store, path), timeout):
            raise SaveError(
                f"{posixpath.join(path, file.name)}: expected {file.size} bytes written by process {process}, found "
                f"{found[file.name] or 'nothing'}; do all processes see the same file system?"
            )
