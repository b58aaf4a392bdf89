"""Copies of checkpoints in other places: the same files, and the same manifest byte for byte."""

import contextlib
import posixpath
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ..._core.leaf_paths import few
from ...errors import CorruptError
from ...stores.claims import TakenOverError
from ...stores.read_errors import ReplacedError, reading
from ...stores.store import Store
from ...stores.whole_files import opened, read_file
from ..safetensors.header import header_size
from . import manifest, metrics, pins
from .commit import Transaction
from .files import ArrayFile
from .manifest import file_names
from .manifest_fields import File
from .new_files import Files, Outcome
from .read import Reader
from .schema import token_of


class Others(Protocol):
    """The processes of other hosts, on whose disks the files are that this host's disk does not have."""

    def copy(
        self,
        token: str,
        files: Files | None,
        own: Callable[[], list[File]],
        commit: Callable[[Sequence[File]], None],
    ) -> None:
        """Has them take part in a copy with `files`, calls `own`, and `commit` with the files that all have copied.

        Without `files`, those with this token are only read, and verified.
        """
        ...


def copy(
    source: Store,
    path: str,
    target: Store,
    to: str,
    *,
    overwrite: bool = False,
    moved: Callable[[int], None] = lambda nbytes: None,
    others: Others | None = None,
) -> str:
    """Copies a checkpoint, verified as it is read, with its pin and the metrics that were added to it.

    Returns its identity.

    moved: told the bytes of every part before it is written; what it raises ends the copy. Nothing is left of it, but
        in a store without locks arrays, which the next copy or save there removes.
    others: those that copy, with `copy_part`, the files that are not here.

    Raises `CorruptError` for a damaged one, `UnsupportedError` for one of a later release, `ReplacedError` for one that
    is deleted meanwhile, and what a save raises.
    """
    reader = Reader(source, path)
    if others is None:
        reader.check_present()
    listed = reader.files
    here = [n for n, one in enumerate(listed) if others is None or source.stat(posixpath.join(path, one.name))]
    reader.hold(here)
    # Others see that the writer of these files lives by the token in their names: see `remove_leftovers`.
    token = _token(reader)
    files = _Copy(target, to, overwrite=overwrite, token=token)

    def copy_own() -> list[File]:
        for number in here:
            _copy_file(files, listed[number], reader.contents(number), moved)
        return [listed[number] for number in here]

    def commit(found: Sequence[File]) -> None:
        _check_complete(path, listed, found)
        files.commit(reader.manifest_bytes)

    try:
        if others:
            others.copy(files.token, files, copy_own, commit)
        else:
            commit(copy_own())
    except BaseException:
        files.abort()
        raise
    metrics.copy(source, path, target, to, reader.identity)
    if pins.pinned(source, path):
        pins.pin(target, to, True)
    return reader.identity


def damaged(store: Store, path: str) -> dict[str, str]:
    """The files of a checkpoint that are damaged or missing, and what is wrong with each. Reads every byte."""
    found: dict[str, str] = {}
    for problem in Reader(store, path).problems():
        found.setdefault(problem.file, str(problem))
    return found


def repair(
    source: Store, path: str, target: Store, to: str, *, moved: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Replaces the damaged and missing files of a copy one by one, each in one step. All else of the copy stays.

    Nothing is removed: whatever ends it, a file of the copy is the new one or as it was. `moved` is as of `copy`.

    Raises `CorruptError` for what is damaged in the checkpoint as well, or has been deleted there meanwhile.
    """
    bad = damaged(target, to)
    try:
        reader = Reader(source, path)
        listed = {one.name: number for number, one in enumerate(reader.files)}
        reader.hold([listed[name] for name in bad if name in listed])
        for name, why in bad.items():
            with target.new_file(posixpath.join(to, name), overwrite=True) as file:
                if name in listed:
                    size = reader.files[listed[name]].size
                    for offset, buffer in reader.contents(listed[name]):
                        moved(min(len(buffer), size - offset))
                        file.write(buffer[: size - offset])
                elif name in metrics.names(source, path, reader.identity):
                    file.write(read_file(source, posixpath.join(path, name)))
                else:
                    raise CorruptError(f"{to}: {why}; {path} has no such file to repair it with")
    except (ReplacedError, FileNotFoundError):
        raise CorruptError(f"{to}: is damaged, and {path} was deleted before it was repaired from there") from None


def check(source: Store, path: str, others: Others | None = None) -> None:
    """Raises `CorruptError` for a checkpoint that is damaged, or lacks files; `others` have those that are not here."""
    reader = Reader(source, path)
    if others is None:
        if problem := next(reader.problems(), None):
            raise CorruptError(str(problem))
        return
    here = [one for one in reader.files if source.stat(posixpath.join(path, one.name))]

    def read_own() -> list[File]:
        for one in here:
            _read(ArrayFile(source, path, one), one)
        return here

    others.copy(_token(reader), None, read_own, lambda found: _check_complete(path, reader.files, found))


def copy_part(source: Store, path: str, token: str, files: Files | None, *, moved: Callable[[int], None]) -> list[File]:
    """Copies, verified, the array files that this host's disk has of a checkpoint, for a `copy` in process 0.

    Without `files`, for its `check`. Process 0 compares what is returned with the manifest, which alone knows the
    checksums of the headers.
    """
    found: list[File] = []
    for name in source.list(path):
        if token_of(name) == token:
            found.append(listed := _as_listed(source, path, name))
            opened = ArrayFile(source, path, listed)
            _copy_file(files, listed, opened.contents(listed), moved) if files else _read(opened, listed)
    if found and files:
        files.store.settle(files.path)
    return found


def _check_complete(path: str, listed: Sequence[File], found: Sequence[File]) -> None:
    there = {one.name: one for one in found}
    if lacking := tuple(one.name for one in listed if there.get(one.name) != one):
        raise CorruptError(
            f"{path}: expected its files on the disks of this job's hosts, as they were saved; not there, or damaged: "
            f"{few(lacking)}"
        )


def _read(file: ArrayFile, listed: File) -> None:
    for _ in file.contents(listed):
        pass


def _token(reader: Reader) -> str:
    return (token_of(reader.files[0].name) if reader.files else None) or ""


def _as_listed(store: Store, path: str, name: str) -> File:
    """An array file as a manifest would list it now."""
    file = posixpath.join(path, name)
    with reading(file), opened(store, file) as blob:
        header = blob.read(0, header_size(blob.read(0, min(8, blob.size)), blob.size, file))
        return File(name, blob.size, len(header), manifest.xxh3(header))


def _copy_file(
    files: Files, listed: File, contents: Iterable[tuple[int, memoryview]], moved: Callable[[int], None]
) -> None:
    sink = files.create(listed.name, expected=listed.size)
    for offset, buffer in contents:
        moved(min(len(buffer), listed.size - offset))
        sink.write(buffer, offset)
    sink.finish(listed.size, read_only=True)


class _Copy(Transaction):
    """A save whose files and manifest are those of another copy of the same checkpoint, by name and byte for byte.

    In a store without locks the other job may have been taken for dead, and so may this one: what it would remove may
    be what the other has committed. While the temporary manifest is there, of which there is one for all, no other
    copy writes.
    """

    def __init__(self, store: Store, path: str, *, overwrite: bool, token: str):
        super().__init__(store, path, overwrite=overwrite, token=token)
        self.retracts = store.has_locks
        if names := [name for name in self._disowned if self._is_own(name)]:  # what an interrupted copy has left
            self._disowned = [name for name in self._disowned if name not in names]
            try:
                self._remove_own()
            except BaseException:
                self.abort()
                raise

    def commit(self, manifest: bytes, check: Callable[[], None] = lambda: None) -> None:
        """As every save does it. When another job has removed arrays meanwhile, the manifest goes, too."""
        try:
            super().commit(manifest, check)
        except TakenOverError:
            with contextlib.suppress(OSError):
                arrays = [path for path in self._open if self._is_own(posixpath.basename(path))]
                if self._look() is Outcome.COMMITTED and any(self.store.stat(path) is None for path in arrays):
                    self.store.delete(self._manifest)
            raise

    def abort(self) -> None:
        """Ends it. Without locks what it wrote stays for the next copy or save to remove: it may be another's."""
        if not self.store.has_locks and not self.must_stay:
            if self._temporary in self._open:
                with contextlib.suppress(OSError):
                    self.store.delete(self._temporary)
            self.outcome = Outcome.IN_DOUBT
        super().abort()

    def _remove_own(self) -> None:
        """Removes the files of these names unless they are committed. Raises `OSError` where that is not known."""
        try:
            committed = file_names(read_file(self.store, self._manifest))
        except FileNotFoundError:
            committed = []
        names = [name for name in self.store.list(self.path) if self._is_own(name) and name not in committed]
        self.store.delete_all(self.path, names)

    def _is_own(self, name: str) -> bool:
        return token_of(name) == self.token
