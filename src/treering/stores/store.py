"""The protocol of a place that stores bytes: a file system, memory or a bucket.

A store knows names and bytes, but not arrays, steps or manifests. Paths are absolute text.
"""

import mmap
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

from .buffers import Range

ABSENT = "absent"  # the version of a path where nothing exists
LOCK_NAME = "writer.lock"  # the file or object in a run that its writer holds


class Stat(NamedTuple):
    """The kind, size, time and version of a path.

    Equal contents of one path have equal versions, changed ones do not.
    """

    kind: Literal["file", "folder", "other"]
    nbytes: int
    modified: float  # seconds since the epoch
    version: Hashable

    @property
    def is_file(self) -> bool:
        """True for a file or an object."""
        return self.kind == "file"

    @property
    def is_folder(self) -> bool:
        """True for a folder, or a key that other keys continue after a slash."""
        return self.kind == "folder"


class FinishedFile(NamedTuple):
    """A finished file or object: its size, and the version that it has unless another program has replaced it."""

    path: str
    version: Hashable
    nbytes: int


class Stored(NamedTuple):
    """The report of a store about a finished file: its version, and True if the store made it from another file."""

    version: Hashable
    is_copy: bool


class Blob(Protocol):
    """A file or object that is open for reading.

    It never reads the bytes of a file that replaced it. If it was deleted and is gone, reading raises `ReplacedError`.
    """

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int:
        """The number of bytes when it was opened."""
        ...

    @property
    def local(self) -> bool:
        """True if it may be mapped by default: mapped pages change only if the file is written."""
        ...

    @property
    def readers(self) -> int:
        """The number of reads that are worth having in flight."""
        ...

    @property
    def read_bytes(self) -> int:
        """The best number of bytes for each read."""
        ...

    @property
    def has_holes(self) -> bool:
        """True if parts of it were never written and read as zeros; False where that cannot be known."""
        ...

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fills a buffer from an offset, with bytes that came with opening it as far as there are any.

        Raises `CorruptError` if the bytes end earlier or cannot be read.
        """
        ...

    def read_again(self, target: memoryview, offset: int) -> None:
        """Does the same with bytes that were wrong: requests them from the store again, or from another copy."""
        ...

    def read(self, offset: int, nbytes: int) -> bytes:
        """Returns bytes from an offset. Raises `CorruptError` if there are fewer."""
        ...

    def read_up_to(self, nbytes: int) -> bytes:
        """Returns the first `nbytes` bytes, or all if there are fewer."""
        ...

    def take(self, ranges: Sequence[Range]) -> list[memoryview] | None:
        """Returns the bytes of some ranges that came with opening it, in memory that only the caller uses from now on.

        Returns None if some of them did not come. Returns None too if they are a small part of what came, because the
        caller would keep all of it in memory.
        """
        ...

    def forget(self) -> None:
        """Frees the bytes that came with opening it."""
        ...

    def mapped(self, ranges: Sequence[Range]) -> mmap.mmap | None:
        """Returns private memory that maps it, for use in these merged ranges only; None if it cannot be mapped."""
        ...

    def populate(self, mapped: mmap.mmap, ranges: Iterable[Range]) -> None:
        """Reads ranges of a mapping once, in parallel. Raises `CorruptError` for pages that cannot be read."""
        ...

    def close(self) -> None:
        """Releases its resources."""
        ...


class Sink(Protocol):
    """A new file or object that is being written.

    Until it is closed, other processes can tell that its writer lives.
    """

    @property
    def path(self) -> str: ...

    @property
    def stored(self) -> Stored | None:
        """The answer of the store, once the file is finished and settled; None where only `Store.stat` knows."""
        ...

    def preallocate(self, nbytes: int) -> memoryview | None:
        """Reserves room, so that a full disk raises before anything is written.

        Returns the memory if the room is in memory. Bytes that the caller puts there need no `write`.
        """
        ...

    def write(self, data: memoryview, offset: int) -> None:
        """Writes an aligned buffer at an aligned offset. Several threads may write at a time."""
        ...

    def finish(self, nbytes: int, *, read_only: bool = False, same_as: FinishedFile | None = None) -> None:
        """Cuts it to its size and makes its contents durable. `Store.settle` makes its name durable.

        same_as: a file with the same bytes, if one is known. If `Store.sharing` is "copies", the server copies that
            file, if it still has its version. Otherwise, or if the server refuses, the bytes are uploaded.
        """
        ...

    def publish(self, path: str, *, overwrite: bool, version: Hashable | None = None) -> None:
        """Gives it its name in one step. Raises `FileExistsError` if the name is taken and `overwrite` is False.

        Raises `LeaseLostError`, before or after that step, if another process may have taken this writer for dead.

        version: the version of the file to overwrite when the caller saw it, or `ABSENT`. Stores that can compare
            versions raise `FileExistsError` for any other version. None overwrites any file.

        The name under which it was created is gone if it overwrites. Otherwise that name may remain as a second one.
        """
        ...

    def is_at(self, path: str) -> bool:
        """Returns True if a path leads to this file or object. Raises `OSError` where that cannot be known."""
        ...

    def close(self) -> None:
        """Closes it as it is."""
        ...


class Writer(Protocol):
    """A file that is written from start to end."""

    @property
    def size(self) -> int:
        """The number of bytes written so far."""
        ...

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        ...


class Lease(Protocol):
    """The right to write a run."""

    lost: bool  # another lease of this process has acquired the run

    def acquire(self) -> None:
        """Acquires the lease unless it is held.

        Raises an `ExistsError` that names the holder, and `MismatchError` if the lease is lost.
        """
        ...

    def check_free(self) -> None:
        """Raises an `ExistsError` that names another process if that is known to hold the lease. Acquires nothing."""
        ...

    def release(self) -> None:
        """Releases the lease."""
        ...


# Returns the files of a folder that belong to a checkpoint of some format, as paths within the folder.
Owned = Callable[["Store", str], Collection[str]]
# Raises `ExistsError` for files that must not stay in a folder
CheckOthers = Callable[["Store", str, Sequence[str]], None]


class Store(Protocol):
    """Names and bytes. Errors are `OSError`s as a file system raises them.

    A store without folders treats common beginnings of names as folders, which need not be made.
    """

    @property
    def has_folders(self) -> bool:
        """True if folders exist by themselves, and their parents must exist."""
        ...

    @property
    def has_locks(self) -> bool:
        """True if the store knows that a writer lives, however long it pauses.

        Otherwise a writer must renew its lease in time.
        """
        ...

    @property
    def sharing(self) -> Literal["links", "copies"] | None:
        """The way to give a file the bytes of another one without writing them; None if there is none.

        "links": by `share`, at least on some disks. Both files have the same bytes on the disk, so damage to them
        damages both. "copies": by `share` and `Sink.finish`. The server copies the bytes, so the files are independent.
        """
        ...

    @property
    def object_bytes(self) -> int | None:
        """The most bytes that a file should have, so that several files are written at a time; None for no limit."""
        ...

    # Reading

    def stat(self, path: str) -> Stat | None:
        """Returns the `Stat` of a path; None if nothing exists at the path."""
        ...

    def list(self, path: str) -> list[str]:
        """Returns the names in a folder, sorted; none if it does not exist."""
        ...

    def open(self, path: str, *, expected: int = 0, into: memoryview | None = None) -> Blob:
        """Opens a file. Raises `CorruptError` for a path that is not a file.

        expected: how many of its first bytes the caller is about to read. Some stores fetch them at once.
        into: memory for the last of these bytes. A store may fetch them into it; then `Blob.take` returns that memory.
            Until then the memory belongs to the blob, and only the opener may use the blob: other readers would take it
            as theirs.
        """
        ...

    def glance(self, path: str) -> AbstractContextManager[None]:
        """Lets `stat` and `list` answer from one listing of a folder, while the `with` block runs.

        Stores with slow requests list everything below the path, unless that is too much. They also remember the
        answers to other requests about it, such as the first bytes of files that were opened. Opening a file that was
        replaced after it was listed raises `ReplacedError`, unless the caller passes `expected`.
        """
        ...

    def is_local(self, path: str) -> bool:
        """Returns True if reads from the path come from this host's disk or memory; False where that is not known."""
        ...

    def is_link(self, path: str) -> bool:
        """Returns True if a path is a link to another."""
        ...

    def real_path(self, path: str) -> str:
        """Returns the path without links."""
        ...

    def tensorstore(self, path: str, context: Any, *, writes: bool = False) -> dict[str, Any]:
        """Returns TensorStore's specification of the files in a folder, to be opened in a `tensorstore.Context`.

        A store that TensorStore cannot reach copies the files into the memory of that context, at least if it `writes`.
        """
        ...

    def written_by_tensorstore(self, path: str, context: Any, which: Callable[[str], bool]) -> None:
        """Copies files that TensorStore wrote to a folder into the store.

        Does nothing if TensorStore wrote to the store itself.

        which: chooses the files, by their paths within the folder. TensorStore cannot read these again.
        """
        ...

    # Writing

    def create(self, path: str, *, visible: bool = False, expected: int = 0) -> Sink:
        """Creates a file, which other processes do not remove until it is closed. Raises `FileExistsError`.

        visible: other processes see the file from now on, and that its writer lives, until it is published or deleted.
            Other files appear when they are finished at the latest, and may raise `FileExistsError` only then.
        expected: the approximate number of bytes, if that is known.
        """
        ...

    def share(self, old: FinishedFile, new: str) -> Sink | None:
        """Creates a finished file with the bytes of another one, without writing them; see `sharing`.

        Deleting either leaves the other as it is. Returns None if the store cannot do that. Raises `FileExistsError`,
        and `FileNotFoundError` also if `old` has another version. Then the name is free.
        """
        ...

    def delete(self, path: str) -> None:
        """Removes a file. Some stores raise `FileNotFoundError` if it does not exist."""
        ...

    def delete_all(self, path: str, names: Iterable[str]) -> None:
        """Removes those of these files that exist in a folder. Raises the first error after it has tried all."""
        ...

    def unused(self, path: str) -> AbstractContextManager[Callable[[], None] | None]:
        """Yields a function that removes a file, or what a killed writer left under a temporary name.

        Within the `with` block no writer can begin to use it. Yields None if a living writer has it, or where that
        cannot be known. Raises `FileNotFoundError`.
        """
        ...

    def make_folder(self, path: str) -> None:
        """Makes a folder. Raises `FileExistsError`."""
        ...

    def make_folders(self, path: str, made: "list[str]") -> None:
        """Makes a folder and its missing parents, durably. Appends those that it made to `made`."""
        ...

    def remove_folder(self, path: str) -> None:
        """Removes an empty folder. Raises `OSError` if it has contents."""
        ...

    def settle(self, path: str) -> None:
        """Makes the names in a folder durable, both new names and removals.

        A finished file may still be uploading until then. This call raises the error of such an upload.
        """
        ...

    def move(self, old: str, new: str, *, last: str) -> None:
        """Moves a folder to a free name. Raises `FileExistsError` and `FileNotFoundError`.

        A store that cannot move in one step copies the files, and then removes the old ones. The file named `last` is
        copied last and removed first, so a folder that has this file is complete at every moment.
        """
        ...

    def new_file(self, path: str, *, overwrite: bool) -> AbstractContextManager[Writer]:
        """Yields a file to write within a `with` block. It is in place at the end; after an error, it never was.

        Raises `ExistsError` for anything at the path, except a file that may be overwritten. Raises `LeaseLostError` in
        a run whose lease another job may have acquired meanwhile.
        """
        ...

    def new_folder(
        self,
        path: str,
        *,
        overwrite: bool,
        owned: Owned,
        names: Collection[str] = (),
        check_others: CheckOthers | None = None,
    ) -> AbstractContextManager[str]:
        """Yields a folder to fill within a `with` block. It is in place at the end; after an error, it never was.

        owned: returns the files of the old folder that belong to the checkpoint. They are replaced; other files are
            kept.
        names: the names that the new folder needs.
        check_others: raises `ExistsError` for files that must not stay in the folder.

        Raises `ExistsError` for an old folder with folders of other things, for other files that have one of `names`,
        and for files that `check_others` refuses.
        """
        ...

    def scratch_folder(self, path: str) -> AbstractContextManager[str]:
        """Yields a folder next to a path. It is removed after the `with` block, or by the next writer after a kill."""
        ...

    def lease(self, run: str, busy: Callable[[], bool] = lambda: False) -> Lease:
        """Returns the lease of a run, not yet acquired.

        No other Checkpointer of this process gets it while `busy` returns True.
        """
        ...
