"""Copies checkpoints between stores. A copy has the same file names and, byte for byte, the same manifest."""

import contextlib
import posixpath
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from ..._core.leaf_paths import join_names
from ...errors import CorruptError
from ...stores.file_io import opened, read_file
from ...stores.lease_registry import LeaseLostError
from ...stores.read_errors import ReplacedError, reading
from ...stores.store import Store
from ..safetensors.header import header_size
from . import host_files, manifest, metrics, pins
from .array_file import ArrayFile
from .commit import Transaction
from .manifest import file_names
from .manifest_fields import File
from .read import Reader
from .save_files import Outcome, SaveFiles
from .schema import token_of


class PeerHosts(Protocol):
    """The processes of the other hosts. Their disks have the files that this host's disk lacks."""

    def copy(
        self,
        token: str,
        files: SaveFiles | None,
        here: Mapping[str, int],
        own: Callable[[Collection[str]], list[File]],
        commit: Callable[[Sequence[File]], None],
    ) -> None:
        """Runs a copy in all processes, then calls `commit` with the files that they have copied.

        token: names the files of the checkpoint that the other processes copy.
        files: None if the processes only read and verify their files.
        here: the names and sizes of the files on this host's disk. Other disks may have some of them too, so each file
            is assigned to one disk.
        own: copies files of this host, given by their names, and returns them.
        """
        ...


def copy(
    source: Store,
    path: str,
    target: Store,
    to: str,
    *,
    overwrite: bool = False,
    on_progress: Callable[[int], None] = lambda nbytes: None,
    others: PeerHosts | None = None,
) -> str:
    """Copies a checkpoint with its pin and the metrics that were added to it. Verifies every byte that it reads.

    Returns the identity of the checkpoint.

    on_progress: called with the number of bytes of every buffer before it is written. An error that it raises ends the
        copy. Nothing remains of an ended copy, except arrays in a store without locks. The next copy or save there
        removes those.
    others: the processes that copy, with `copy_local_files`, the files that this host lacks.

    Raises `CorruptError` for a damaged checkpoint, `UnsupportedError` for one that a later release wrote,
    `ReplacedError` for one that is deleted during the copy, and the errors of a save.
    """
    reader = Reader(source, path)
    if others is None:
        reader.check_present()
    listed = reader.files
    here = [n for n, one in enumerate(listed) if others is None or source.stat(posixpath.join(path, one.name))]
    # Where open files outlive their names, the copy can finish even if the source is deleted during it.
    reader.open_files(here)
    # The token in the names of the files leads other processes to the temporary manifest, whose lock shows that this
    # writer lives: see `collect_garbage`.
    token = _token(reader)
    files = _Copy(target, to, overwrite=overwrite, token=token)

    def copy_own(names: Collection[str] | None = None) -> list[File]:
        own = [number for number in here if names is None or listed[number].name in names]
        for number in own:
            _copy_file(files, listed[number], reader.contents(number), on_progress)
        return [listed[number] for number in own]

    def commit(found: Sequence[File]) -> None:
        _check_complete(path, listed, found)
        files.commit(reader.manifest_bytes)

    try:
        if others:
            others.copy(files.token, files, _sizes(listed[number] for number in here), copy_own, commit)
        else:
            commit(copy_own())
    except BaseException:
        files.abort()
        raise
    metrics.copy(source, path, target, to, reader.identity)
    if pins.is_pinned(source, path):
        pins.pin(target, to, True)
    return reader.identity


def damaged_files(store: Store, path: str) -> dict[str, str]:
    """Returns the damaged and missing files of a checkpoint, with the problem of each. Reads every byte."""
    found: dict[str, str] = {}
    for problem in Reader(store, path).problems():
        found.setdefault(problem.file, str(problem))
    return found


def repair(
    source: Store, path: str, target: Store, to: str, *, on_progress: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Replaces the damaged and missing files of a copy, each in one step. The other files stay as they are.

    Nothing is removed: if the repair is interrupted, every file of the copy is either the new or the old one.
    `on_progress` is the parameter of `copy`.

    Raises `CorruptError` for a file that the checkpoint cannot replace, because it is damaged there too or was deleted
    during the repair.
    """
    bad = damaged_files(target, to)
    try:
        reader = Reader(source, path)
        listed = {one.name: number for number, one in enumerate(reader.files)}
        reader.open_files([listed[name] for name in bad if name in listed])
        for name, why in bad.items():
            with target.new_file(posixpath.join(to, name), overwrite=True) as file:
                if name in listed:
                    size = reader.files[listed[name]].size
                    for offset, buffer in reader.contents(listed[name]):
                        on_progress(min(len(buffer), size - offset))
                        file.write(buffer[: size - offset])
                elif name in metrics.names(source, path, reader.identity):
                    file.write(read_file(source, posixpath.join(path, name)))
                else:
                    raise CorruptError(f"{to}: {why}; {path} has no such file to repair it with")
    except (ReplacedError, FileNotFoundError):
        raise CorruptError(f"{to}: the copy is damaged, and {path} was deleted before the repair ended") from None


def check(source: Store, path: str, others: PeerHosts | None = None) -> None:
    """Raises `CorruptError` for a checkpoint that is damaged or lacks files.

    others: the processes that verify the files that this host lacks.
    """
    reader = Reader(source, path)
    if others is None:
        if problem := next(reader.problems(), None):
            raise CorruptError(str(problem))
        return
    here = [one for one in reader.files if source.stat(posixpath.join(path, one.name))]

    def read_own(names: Collection[str]) -> list[File]:
        own = [one for one in here if one.name in names]
        for one in own:
            _verify_file(ArrayFile(source, path, one), one)
        return own

    others.copy(_token(reader), None, _sizes(here), read_own, lambda found: _check_complete(path, reader.files, found))


def copy_local_files(
    source: Store, path: str, names: Collection[str], files: SaveFiles | None, *, on_progress: Callable[[int], None]
) -> list[File]:
    """Copies, verified, array files that this host's disk has of a checkpoint, for a `copy` in process 0.

    Without `files` it only verifies them, for a `check` in process 0. Returns the files with the checksums of their
    headers. Process 0 compares these with its manifest, because this disk may lack the manifest.

    Raises `CorruptError` for damaged files.
    """
    known = {one.name: one for one in host_files.listed_files(source, path) or ()}
    found: list[File] = []
    for name in names:
        # Only the manifest tells a damaged header from one that a later release wrote.
        found.append(listed := known.get(name) or _list_entry(source, path, name))
        opened = ArrayFile(source, path, listed)
        _copy_file(files, listed, opened.contents(listed), on_progress) if files else _verify_file(opened, listed)
    if found and files:
        # Process 0 commits after all hosts have reported. By then the names of these files must be durable.
        files.store.settle(files.path)
    return found


def _sizes(files: Iterable[File]) -> dict[str, int]:
    return {one.name: one.size for one in files}


def _check_complete(path: str, listed: Sequence[File], found: Sequence[File]) -> None:
    there = {one.name: one for one in found}
    if missing := tuple(one.name for one in listed if there.get(one.name) != one):
        raise CorruptError(
            f"{path}: expected its files on the disks of this job's hosts, as they were saved; missing or damaged: "
            f"{join_names(missing)}"
        )


def _verify_file(file: ArrayFile, listed: File) -> None:
    for _ in file.contents(listed):
        pass


def _token(reader: Reader) -> str:
    return (token_of(reader.files[0].name) if reader.files else None) or ""


def _list_entry(store: Store, path: str, name: str) -> File:
    """An array file as a manifest would list it now."""
    file = posixpath.join(path, name)
    with reading(file), opened(store, file) as blob:
        header = blob.read(0, header_size(blob.read(0, min(8, blob.size)), blob.size, file))
        return File(name, blob.size, len(header), manifest.xxh3(header))


def _copy_file(
    files: SaveFiles, listed: File, contents: Iterable[tuple[int, memoryview]], on_progress: Callable[[int], None]
) -> None:
    sink = files.create(listed.name, expected=listed.size)
    for offset, buffer in contents:
        on_progress(min(len(buffer), listed.size - offset))
        sink.write(buffer, offset)
    sink.finish(listed.size, read_only=True)


class _Copy(Transaction):
    """A save whose files have the names and the bytes of another copy of the same checkpoint.

    Two jobs may therefore copy to the same names. A store without locks may take a job that only stands still for
    dead, so a file that this job wants to remove may be one that another job has committed. All copies use the same
    temporary manifest: while it exists, no other copy writes.
    """

    def __init__(self, store: Store, path: str, *, overwrite: bool, token: str):
        super().__init__(store, path, overwrite=overwrite, token=token)
        self.rolls_back = store.has_locks
        if names := [name for name in self._orphans if self._has_token(name)]:  # the files of an interrupted copy
            self._orphans = [name for name in self._orphans if name not in names]
            try:
                self._remove_uncommitted()
            except BaseException:
                self.abort()
                raise

    def commit(self, manifest: bytes, check: Callable[[], None] = lambda: None) -> None:
        """Publishes the copy, as `Transaction.commit` does.

        If another job has taken the run and removed some of the arrays, the new manifest is removed too: it would name
        files that no longer exist.
        """
        try:
            super().commit(manifest, check)
        except LeaseLostError:
            with contextlib.suppress(OSError):
                arrays = [path for path in self._sinks if self._has_token(posixpath.basename(path))]
                if self._look() is Outcome.COMMITTED and any(self.store.stat(path) is None for path in arrays):
                    self.store.delete(self._manifest)
            raise

    def abort(self) -> None:
        """Ends it. Without locks what it wrote stays for the next copy or save to remove: it may be another's."""
        if not self.store.has_locks and not self.must_stay:
            if self._temporary in self._sinks:
                with contextlib.suppress(OSError):
                    self.store.delete(self._temporary)
            self.outcome = Outcome.IN_DOUBT
        super().abort()

    def _remove_uncommitted(self) -> None:
        """Removes the files with the token of this copy unless a manifest names them.

        Raises `OSError` if the manifest cannot be read.
        """
        try:
            committed = file_names(read_file(self.store, self._manifest))
        except FileNotFoundError:
            committed = []
        names = [name for name in self.store.list(self.path) if self._has_token(name) and name not in committed]
        self.store.delete_all(self.path, names)

    def _has_token(self, name: str) -> bool:
        return token_of(name) == self.token
