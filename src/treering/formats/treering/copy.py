"""Copies checkpoints between stores. A copy has the same file names and, byte for byte, the same manifest."""

import contextlib
import posixpath
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ...errors import CorruptError
from ...stores.file_io import read_file
from ...stores.lease_registry import LeaseLostError
from ...stores.read_errors import ReplacedError
from ...stores.store import Store
from . import metrics, pins
from .array_file import ArrayFile
from .commit import Transaction
from .ledger import CopiedFiles, Ledger
from .manifest import file_names
from .manifest_fields import File
from .read import Reader
from .save_files import Outcome, SaveFiles
from .schema import token_of

OnProgress = Callable[[int], None]


class PeerHosts(Protocol):
    """The processes of all hosts. Each file of the checkpoint is on the disk of at least one host."""

    def copy(
        self,
        token: str,
        files: SaveFiles | None,
        listed: Sequence[File],
        on_progress: OnProgress,
        commit: Callable[[], None],
    ) -> None:
        """Copies the listed files in all processes with `copy_files`, then calls `commit`.

        token: names the files of the checkpoint. files: None if the processes only read and verify their files.
        on_progress: the parameter of `copy`, for the files that this process copies.
        """
        ...


def copy(
    source: Store,
    path: str,
    target: Store,
    to: str,
    *,
    overwrite: bool = False,
    on_progress: OnProgress = lambda nbytes: None,
    others: PeerHosts | None = None,
    ledger: Ledger | None = None,
) -> str:
    """Copies a checkpoint with its pin and the metrics that were added to it. Verifies every byte that it reads.

    Returns the identity of the checkpoint.

    on_progress: called with the number of bytes of every buffer before it is written. An error that it raises ends the
        copy. Nothing remains of an ended copy, except arrays in a store without locks. The next copy or save there
        removes those.
    others: the processes that copy the files, if each host has a disk of its own with a part of them.
    ledger: the files that this process has copied to the run before. Equal ones are neither read nor sent again.

    Raises `CorruptError` for a damaged checkpoint, `UnsupportedError` for one that a later release wrote,
    `ReplacedError` for one that is deleted during the copy, and the errors of a save.
    """
    reader = Reader(source, path)
    if others is None:
        reader.check_present()
        # Where open files outlive their names, the copy can finish even if the source is deleted during it.
        reader.open_files(range(len(reader.files)))
    # The token in the names of the files leads other processes to the temporary manifest, whose lock shows that this
    # writer lives: see `collect_garbage`.
    token = _token(reader)
    files = _Copy(target, to, overwrite=overwrite, token=token)

    def commit() -> None:
        files.commit(reader.manifest_bytes)

    try:
        if others:
            others.copy(files.token, files, reader.files, on_progress, commit)
        else:
            copied = CopiedFiles(ledger, files)
            for number, one in enumerate(reader.files):
                _copy_file(files, one, reader.contents(number), on_progress, copied)
            commit()
            copied.end()  # An uncommitted checkpoint is no neighbor of the next one.
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


def repair(source: Store, path: str, target: Store, to: str, *, on_progress: OnProgress = lambda nbytes: None) -> None:
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

    others: the processes that verify the files, if each host has a disk of its own with a part of them.
    """
    reader = Reader(source, path)
    if others:
        others.copy(_token(reader), None, reader.files, lambda nbytes: None, lambda: None)
    elif problem := next(reader.problems(), None):
        raise CorruptError(str(problem))


def copy_files(
    source: Store,
    path: str,
    listed: Sequence[File],
    files: SaveFiles | None,
    *,
    on_progress: OnProgress,
    ledger: Ledger | None = None,
) -> None:
    """Copies, verified, some array files of a checkpoint, for a `copy` in process 0.

    Without `files` it only verifies them, for a `check` in process 0.
    """
    copied = CopiedFiles(ledger, files) if files else None
    for one in listed:
        opened = ArrayFile(source, path, one)
        if files and copied:
            _copy_file(files, one, opened.contents(one), on_progress, copied)
        else:
            for _ in opened.contents(one):
                pass
    if copied:
        copied.end()
    if listed and files:
        # Process 0 commits after all hosts have reported. By then the names of these files must be durable.
        files.store.settle(files.path)


def _token(reader: Reader) -> str:
    return (token_of(reader.files[0].name) if reader.files else None) or ""


def _copy_file(
    files: SaveFiles,
    listed: File,
    contents: Iterable[tuple[int, memoryview]],
    on_progress: OnProgress,
    copied: CopiedFiles,
) -> None:
    on_progress(0)
    if copied.share(listed):
        return
    sink = files.create(listed.name, expected=listed.size)
    for offset, buffer in contents:
        on_progress(min(len(buffer), listed.size - offset))
        sink.write(buffer, offset)
    sink.finish(listed.size, read_only=True)
    copied.note(listed, sink)


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

    def commit(self, manifest: bytes, check: Callable[[], None] | None = None) -> None:
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
