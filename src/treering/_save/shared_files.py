"""Array files that a save shares with an earlier step, because the arrays in them have not changed.

The save gives such a file another name in its own directory (a hard link), so every checkpoint stays complete by
itself. If the disk cannot do that, the bytes are copied and checked.

A bucket has no links, but its server copies objects. There a file is planned, filled and hashed as usual. If an earlier
file turns out to have the same bytes, the server copies that instead of receiving the bytes.
"""

import errno
import logging
import os
import posixpath
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from .._core.entries import Entry
from .._processes.assignment import Assignment, Piece
from .._pytree.lazy_supply import ShardSupply
from .._pytree.leaves import Catalogue
from ..errors import CorruptError, SaveError
from ..formats.treering.array_file import ArrayFile
from ..formats.treering.manifest_fields import Base, Delta, File
from ..formats.treering.save_files import SaveFiles
from ..stores.store import FinishedFile, Sink, Store, Stored
from .layout import PlannedFile

_log = logging.getLogger("treering")


class SavedFile(NamedTuple):
    """An array file of a committed step.

    path: the step's directory.
    version: that of the file, see `Stat`. The names of a shared file have the same one.
    pieces: the number of pieces in it.
    checksums: those of its blocks, as in its header.
    is_own: True if this job has written it. Otherwise its bytes are checked before it is shared.
    """

    path: str
    listed: File
    version: Hashable
    pieces: int
    checksums: str
    is_own: bool = True

    @property
    def finished(self) -> FinishedFile:
        """The file as stores see it."""
        return FinishedFile(posixpath.join(self.path, self.listed.name), self.version, self.listed.size)


class SharedFile(NamedTuple):
    """A file that a save shares.

    held: the file, open, so that its bytes can be copied even if the step is deleted meanwhile.
    numbers: those of the pieces in it.
    """

    saved: SavedFile
    held: ArrayFile
    numbers: Sequence[int]


class WrittenFile(NamedTuple):
    """An array file of a save.

    numbers: those of the pieces in it.
    begins: the place of each piece in the buffer, and the size of the buffer; () if it has the bytes of a file of an
        earlier step.
    checksums: those of its blocks.
    shared_bytes: its size if it was not written, because it is shared or the server has copied it; else 0.
    version: that of the file, if the store has said it; else None.
    """

    listed: File
    numbers: Sequence[int]
    begins: Sequence[int]
    checksums: str
    shared_bytes: int = 0
    link_refused: bool = False
    version: Hashable | None = None

    @property
    def is_reused(self) -> bool:
        """True if it has the bytes of a file of an earlier step, shared or copied."""
        return not self.begins


class Chosen(NamedTuple):
    """The files of a save.

    shared: the files that are shared.
    order: the numbers of the other pieces, in the order of writing.
    groups: how many successive pieces each file has. A large group may take several files.
    likely: how many of these pieces, the first ones, have probably not changed. `Reuse.same_layout` has files to
        compare them with.
    """

    shared: Sequence[SharedFile]
    order: Sequence[int]
    groups: Sequence[int]
    likely: int = 0


class OwnParts(NamedTuple):
    """What a process of several writes of the arrays, each part with an entry of its own.

    entries: those of the leaves, and then those of the parts.
    shares: the parts, by their numbers in `entries`; this process writes all.
    leaves: for each part, the number of the leaf, and that of its box in the leaf's assignment.
    """

    entries: Sequence[Entry]
    shares: Mapping[int, Assignment]
    leaves: Mapping[int, tuple[int, int]]


class Encoded(NamedTuple):
    """What a save writes instead of its arrays.

    catalogue, shares, supply: as in `plan.NativePlan`.
    base: the checkpoint that the differences refer to; None without any.
    differences: for each difference, by the number of its entry: the array, and how it is stored.
    own: the parts of this process, if several write.
    """

    catalogue: Catalogue
    shares: Mapping[int, Assignment] | None
    supply: ShardSupply
    base: Base | None = None
    differences: Mapping[int, tuple[Entry, Delta]] = {}
    own: OwnParts | None = None


class Deltas(Protocol):
    """What a save stores as differences to another checkpoint; see `_publish.encoder`.

    begun: when the save began, by `time.perf_counter`.
    """

    begun: float

    def encode(
        self, target: Any, catalogue: Catalogue, shares: Mapping[int, Assignment] | None, supply: ShardSupply
    ) -> Encoded:
        """Returns what to write. Called in the background thread, before anything is written.

        target: the `NativeTarget`. shares: those of all processes; see `plan.NativePlan`.
        """
        ...

    def committed(self, identity: str, is_complete: bool) -> None:
        """Notes that the save is committed.

        identity: that of the checkpoint. is_complete: False in process 0 if the checkpoint has differences.
        """
        ...


class Reuse(Protocol):
    """The unchanged arrays of a save; see `_save.unchanged`. A piece is known by its number in the list of `choose`.

    deferred: the leaves that are copied last, because the files of earlier steps probably have them.
    """

    deferred: Collection[int]

    def find_bases(self) -> Any:
        """Returns the steps whose files the save may share, as JSON. Process 0 calls it."""
        ...

    def choose(self, bases: Any, entries: Sequence[Entry], pieces: Sequence[Piece], *, by_shard: bool) -> Chosen | None:
        """Chooses the files of this process. Returns None if no array is known to be unchanged.

        by_shard: True if the writers must take the shards in order, because memory is limited.
        """
        ...

    def same_layout(self, plan: PlannedFile, numbers: Sequence[int]) -> SharedFile | None:
        """Returns a file that may be shared and has the same pieces at the same places as the planned file."""
        ...

    def same_content(self, listed: File, checksums: str) -> FinishedFile | None:
        """Returns a file that the server may copy because it has the same bytes, by the checksums of its blocks."""
        ...

    def committed(self, files: Sequence[WrittenFile]) -> None:
        """Notes the files of this process after the commit, in the order of writing. Does not raise."""
        ...


def hold(store: Store, saved: SavedFile) -> ArrayFile | None:
    """Opens a file of an earlier step to share it. Returns None if it is not as it was written, which is logged."""
    try:
        found = store.stat(posixpath.join(saved.path, saved.listed.name))
        if found and found.version == saved.version:
            return ArrayFile(store, saved.path, saved.listed)
        problem = "changed after it was written" if found else "deleted"
    except (CorruptError, OSError) as error:
        problem = str(error)
    _log.info("%s: arrays in it that have not changed are written again: %s", saved.listed.name, problem)
    return None


def is_damaged(file: ArrayFile) -> bool:
    """Returns True if bytes of an open file do not fit its checksums, which is logged. Closes the file then."""
    try:
        if not (bad := file.bad_blocks([(0, file.size - file.header.size)])):
            return False
        problem = f"block {bad[0]} is damaged"
    except (CorruptError, OSError) as error:
        problem = str(error)
    file.close()
    _log.warning("%s: not shared, and its arrays are written again: %s", file.path, problem)
    return True


def version(store: Store, path: str, listed: File) -> Hashable:
    """Returns the version of a file of a committed step. Raises `OSError` if it cannot be found."""
    found = store.stat(file := posixpath.join(path, listed.name))
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)
    return found.version


def with_answer(written: WrittenFile, stored: Stored | None) -> WrittenFile:
    """Returns a file of a save with the answer of the store to it; see `Sink.stored`."""
    if stored is None:
        return written
    return written._replace(version=stored.version, shared_bytes=written.listed.size if stored.is_copy else 0)


def share(files: SaveFiles, name: str, shared: SharedFile) -> WrittenFile:
    """Puts a shared file into a save, under a new name.

    Raises `SaveError` if bytes must be copied and are damaged.
    """
    saved, held, numbers = shared
    listed = File(name, saved.listed.size, saved.listed.header, saved.listed.xxh3)
    old = saved.finished
    is_shared = _is_shared(files, name, old)
    if is_shared is None:
        _log.warning(
            "%s: copied to %s, because it got no second name (hard link) there: the disk has no links, or the file has "
            "another owner or mode than new files",
            old.path, files.path,
        )  # fmt: skip
    elif not is_shared:
        _log.info("%s: copied to %s, because it was deleted or replaced just now", old.path, files.path)
    if not is_shared:
        _copy(files.create(name), listed, held.contents(saved.listed))
    held.close()  # Retention may delete the step that it was opened in.
    nbytes = listed.size if is_shared else 0
    return WrittenFile(listed, numbers, (), saved.checksums, shared_bytes=nbytes, link_refused=is_shared is None)


def _is_shared(files: SaveFiles, name: str, old: FinishedFile) -> bool | None:
    """Returns None if the disk has no links, and False if the file was deleted or replaced."""
    try:
        return files.share(name, old) is not None or None
    except FileNotFoundError:  # If the directory of the save was deleted, `create` raises the same.
        return False


def _copy(sink: Sink, listed: File, contents: Iterable[tuple[int, memoryview]]) -> None:
    sink.preallocate(listed.size)
    try:
        for offset, buffer in contents:
            sink.write(buffer, offset)
    except CorruptError as error:
        raise SaveError(f"{error}; nothing is saved; the next save writes all arrays (leave out base=)") from error
    sink.finish(listed.size, read_only=True)
