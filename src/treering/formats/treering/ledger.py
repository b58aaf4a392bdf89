"""The array files that a checkpoint may have in common with earlier ones, so that their bytes are not written again.

On a disk such a file gets another name in the directory of the new checkpoint (a hard link), so every checkpoint stays
complete by itself. If the disk cannot do that, the bytes are copied and checked. A bucket has no links, but its server
copies objects.

Two copies take turns, because damage to one file must not cost all checkpoints: a checkpoint shares no file with its
neighbor, the one that would be used in its place. For an array that never changes:

| save | array | file | neighbor | why this file |
| --: | --- | --- | --- | --- |
| 1 | new | A, with all new arrays | none | |
| 2 | the object of save 1 | B, for unchanged arrays alone | 1 (A) | A has other arrays too, which may change |
| 3 | the same | C | 2 (B) | B is in the neighbor |
| 4 | the same | B again | 3 (C) | C is in the neighbor, B is not |
| 5 | the same | C again | 4 (B) | |

| writer | storage | neighbor | files that it may share |
| --- | --- | --- | --- |
| a save of a run | disk | the newest step that stays after retention | those of all steps; none if no step stays |
| a save with `base=` | disk | none, for the caller asks for these files | those of the base |
| `treering copy` of a run | disk | the checkpoint that it copied last | those of the one before |
| any of these, an upload | bucket | none: what the server copies is independent | those of the last one or two |

An upload to a disk shares nothing: retention may delete the steps between two that share a file, and make them
neighbors.

Rejected: leaving the file of an unchanged array where it is, and naming it in later manifests, because a checkpoint
would then need others; and counting links, because it does not tell which steps they belong to.
"""

import contextlib
import errno
import logging
import os
import posixpath
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

from ...errors import CorruptError, SaveError
from ...stores.store import FinishedFile, Sink, Store
from .array_file import ArrayFile
from .manifest_fields import File
from .save_files import SaveFiles

_log = logging.getLogger("treering")


class WrittenFile(NamedTuple):
    """An array file of a checkpoint, as a process knows it that has written, shared or copied it.

    path: the directory of the checkpoint.
    listed: its entry in the manifest.
    version: that of the file, see `Stat`; None while it is not known. The names of a shared file have the same one.
    checksums: those of its blocks, as in its header; "" if nothing compares them.
    numbers: those of the pieces in it. Once the checkpoint is committed, only their number counts.
    begins: the place of each piece in the buffer, and the size of the buffer; () if it has the bytes of a file of an
        earlier step.
    is_own: True if this job has written it. Otherwise its bytes are checked before it is shared.
    shared_bytes: its size if it was not written, because it is shared or the server has copied it; else 0.
    link_refused: True if the bytes were copied because the disk has no links.
    held: the file, open, while a save that shares it is under way, so that its bytes can be copied even if the step is
        deleted meanwhile.
    """

    path: str
    listed: File
    version: Hashable = None
    checksums: str = ""
    numbers: Sequence[int] = ()
    begins: Sequence[int] = ()
    is_own: bool = True
    shared_bytes: int = 0
    link_refused: bool = False
    held: ArrayFile | None = None

    @property
    def is_reused(self) -> bool:
        """True if a save took its bytes from a file of an earlier step."""
        return not self.begins

    @property
    def finished(self) -> FinishedFile:
        """The file as stores see it."""
        return FinishedFile(posixpath.join(self.path, self.listed.name), self.version, self.listed.size)


class Ledger:
    """The array files of earlier checkpoints that this process knows.

    max_checkpoints: how many checkpoints it keeps, the last ones; None for all.
    """

    def __init__(self, max_checkpoints: int | None = None):
        self._max_checkpoints = max_checkpoints
        self._files: dict[str, Sequence[WrittenFile]] = {}  # by the path of the checkpoint; the last noted one is last

    @property
    def last(self) -> str | None:
        """The path of the checkpoint that was noted last."""
        return next(reversed(self._files), None)

    def note(self, path: str, files: Iterable[WrittenFile]) -> None:
        """Notes the files of a checkpoint, in place of those of one that was there before."""
        self._files.pop(path, None)
        known = (file for file in files if file.version is not None)
        self._files[path] = [file._replace(numbers=range(len(file.numbers)), begins=()) for file in known]
        if self._max_checkpoints is not None:
            for old in [*self._files][: -self._max_checkpoints]:
                del self._files[old]

    def keep(self, paths: Collection[str | None]) -> None:
        """Forgets the files of all checkpoints except those at these paths."""
        self._files = {path: files for path, files in self._files.items() if path in paths}

    def keep_versions(self, versions: Collection[Hashable]) -> None:
        """Forgets all files except those with these versions."""
        kept = {path: [file for file in files if file.version in versions] for path, files in self._files.items()}
        self._files = {path: files for path, files in kept.items() if files}

    def versions(self) -> dict[tuple[int, int, str], set[Hashable]]:
        """Returns the versions of the known files by their contents."""
        found: dict[tuple[int, int, str], set[Hashable]] = {}
        for files in self._files.values():
            for file in files:
                found.setdefault(file.listed.content, set()).add(file.version)
        return found

    def usable(self, neighbor: str | None, newest_first: Iterable[str] | None = None) -> dict[Hashable, WrittenFile]:
        """Returns the files that a checkpoint may share, by their versions: of each the newest known name.

        neighbor: the path of the checkpoint whose files are not shared; None if there is none.
        newest_first: the paths of the checkpoints whose files may be shared; by default, of all known ones.
        """
        taken = {file.version for file in self._files.get(neighbor or "", ())}
        found: dict[Hashable, WrittenFile] = {}
        for path in reversed(self._files) if newest_first is None else newest_first:
            for file in self._files.get(path, ()):
                if file.version not in taken:
                    found.setdefault(file.version, file)
        return found


class CopiedFiles:
    """The array files of one checkpoint that is copied: equal ones of the last copies are not sent again.

    If `ledger` is None, all are sent, and none is noted.
    """

    def __init__(self, ledger: Ledger | None, files: SaveFiles):
        self._ledger, self._files, self._copied = ledger, files, list[WrittenFile]()
        self._equal: dict[tuple[int, int, str], list[FinishedFile]] = {}
        for file in ledger.usable(ledger.last if files.store.sharing == "links" else None).values() if ledger else ():
            self._equal.setdefault(file.listed.content, []).append(file.finished)

    def share(self, listed: File) -> bool:
        """Makes a file from an equal one. Returns False if it must be sent."""
        path = posixpath.join(self._files.path, listed.name)
        for old in self._equal.get(listed.content, ()):
            if old.path == path:  # of an attempt that failed, which removed it
                continue
            with contextlib.suppress(FileNotFoundError):  # It was deleted or replaced, as its version tells.
                if sink := self._files.share(listed.name, old):
                    self.note(listed, sink)
                    return True
        return False

    def note(self, listed: File, sink: Sink) -> None:
        """Notes a finished file."""
        if self._ledger:
            found = sink.stored or self._files.store.stat(posixpath.join(self._files.path, listed.name))
            self._copied.append(WrittenFile(self._files.path, listed, found and found.version))

    def end(self) -> None:
        """Enters the files into the ledger."""
        if self._ledger and self._copied:
            self._ledger.note(self._files.path, self._copied)


def open_if_unchanged(store: Store, file: WrittenFile) -> WrittenFile | None:
    """Opens a file to share it. Returns None if it is not as it was written, which is logged."""
    try:
        found = store.stat(file.finished.path)
        if found and found.version == file.version:
            return file._replace(held=ArrayFile(store, file.path, file.listed))
        problem = "changed after it was written" if found else "deleted"
    except (CorruptError, OSError) as error:
        problem = str(error)
    _log.info("%s: arrays in it that have not changed are written again: %s", file.listed.name, problem)
    return None


def is_damaged(file: WrittenFile) -> bool:
    """Returns True if bytes of a held file do not fit its checksums, which is logged. Closes the file then.

    The files of this job were checked when they were written.
    """
    if file.is_own or file.held is None:
        return False
    try:
        if not (bad := file.held.bad_blocks([(0, file.held.size - file.held.header.size)])):
            return False
        problem = f"block {bad[0]} is damaged"
    except (CorruptError, OSError) as error:
        problem = str(error)
    file.held.close()
    _log.warning("%s: not shared, and its arrays are written again: %s", file.held.path, problem)
    return True


def version(store: Store, path: str, listed: File) -> Hashable:
    """Returns the version of a file of a committed step. Raises `OSError` if it cannot be found."""
    found = store.stat(file := posixpath.join(path, listed.name))
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)
    return found.version


def link_or_copy(files: SaveFiles, name: str, file: WrittenFile) -> WrittenFile:
    """Puts a held file into a save, under a new name.

    Raises `SaveError` if bytes must be copied and are damaged.
    """
    assert file.held
    old, listed = file.finished, File(name, file.listed.size, file.listed.header, file.listed.xxh3)
    try:
        is_shared = files.share(name, old) is not None
        link_refused = not is_shared
    except FileNotFoundError:  # If the directory of the save was deleted, `create` raises the same.
        is_shared = link_refused = False
    if link_refused:
        _log.warning(
            "%s: copied to %s, because it got no second name (hard link) there: the disk has no links, or the file has "
            "another owner or mode than new files",
            old.path, files.path,
        )  # fmt: skip
    elif not is_shared:
        _log.info("%s: copied to %s, because it was deleted or replaced just now", old.path, files.path)
    if not is_shared:
        _copy(files.create(name), listed, file.held.contents(file.listed))
    file.held.close()  # Retention may delete the step that it was opened in.
    shared_bytes = listed.size if is_shared else 0
    return WrittenFile(
        files.path, listed, None, file.checksums, file.numbers, shared_bytes=shared_bytes, link_refused=link_refused
    )


def _copy(sink: Sink, listed: File, contents: Iterable[tuple[int, memoryview]]) -> None:
    sink.preallocate(listed.size)
    try:
        for offset, buffer in contents:
            sink.write(buffer, offset)
    except CorruptError as error:
        raise SaveError(f"{error}; nothing is saved; the next save writes all arrays (leave out base=)") from error
    sink.finish(listed.size, read_only=True)
