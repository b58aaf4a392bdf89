"""The protocol of a place where bytes live: a file system, memory, a bucket.

A store knows names and bytes; what an array, a step or a manifest is, it does not know. Paths are absolute text.
"""

import mmap
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

from .ranges import Range

ABSENT = "absent"  # the version of what is not there
LOCK_NAME = "writer.lock"  # of the file or object of a run that its writer holds


class Stat(NamedTuple):
    """What a path leads to. Two looks at the same contents have equal versions; contents that differ have others."""

    kind: Literal["file", "folder", "other"]
    nbytes: int
    modified: float  # seconds since the epoch
    version: Hashable

    @property
    def is_file(self) -> bool:
        """Whether it is a file, or an object."""
        return self.kind == "file"

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, or the beginning of the names of objects."""
        return self.kind == "folder"


class Blob(Protocol):
    """A file or object that is open for reading.

    What replaces it is never read in its place; where a deleted one is gone for good, that is a `ReplacedError`.
    """

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int:
        """The number of bytes when it was opened."""
        ...

    @property
    def local(self) -> bool:
        """Whether it may be mapped unasked: its pages stay as they were read unless it is written."""
        ...

    @property
    def readers(self) -> int:
        """The number of reads that are worth having in flight."""
        ...

    @property
    def read_bytes(self) -> int:
        """The bytes that each of them had best read."""
        ...

    @property
    def has_holes(self) -> bool:
        """Whether parts of it were never written, and read as zeros; False where that cannot be known."""
        ...

    def read_into(self, target: memoryview, offset: int, *, anew: bool = False) -> None:
        """Fills a buffer from an offset, `anew` from where the bytes lie even if they are known.

        Raises `CorruptError` when the bytes end before, or cannot be read.
        """
        ...

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes from an offset. Raises `CorruptError` when there are fewer."""
        ...

    def read_up_to(self, nbytes: int) -> bytes:
        """The first bytes, or all where there are fewer."""
        ...

    def take(self, ranges: Sequence[Range]) -> list[memoryview] | None:
        """The bytes of some ranges that came with opening it, in memory that is the caller's alone from now on.

        None where they did not all come, or are the lesser part of what did, which would be kept with them.
        """
        ...

    def forget(self) -> None:
        """Lets go of bytes in memory that came with opening it; they are read again when they are asked for."""
        ...

    def mapped(self, ranges: Sequence[Range]) -> mmap.mmap | None:
        """Private memory with all of it, of which the caller gets these merged ranges; None where there is none."""
        ...

    def bring_in(self, mapped: mmap.mmap, begin: int, end: int) -> None:
        """Reads a range of a mapping once. Raises `CorruptError` for what cannot be read."""
        ...

    def bring_all_in(self, mapped: mmap.mmap, ranges: Iterable[Range]) -> None:
        """Reads several ranges of a mapping once, in parallel."""
        ...

    def close(self) -> None:
        """Lets go of it."""
        ...


class Sink(Protocol):
    """A new file or object that is being written. Until it is closed, others can tell that its writer lives."""

    @property
    def path(self) -> str: ...

    def protect(self) -> bool:
        """Keeps others from removing it as a leftover; False when one of them was faster."""
        ...

    def preallocate(self, nbytes: int) -> memoryview | None:
        """Reserves room, so that a full disk shows before anything is written.

        Returns the memory, where that is what the room is: what is put there is as good as written.
        """
        ...

    def write(self, data: memoryview, offset: int) -> None:
        """Writes an aligned buffer at an aligned offset. Several threads may write at a time."""
        ...

    def finish(self, nbytes: int, *, read_only: bool = False) -> None:
        """Cuts it to its size and makes it durable, but for its name: see `Store.settle`."""
        ...

    def publish(self, path: str, *, overwrite: bool, version: Hashable | None = None, retract: bool = True) -> None:
        """Gives it its name, in one step. Raises `FileExistsError` when that is taken, unless it is to be overwritten.

        version: that of what is to be overwritten when it was seen, or `ABSENT`; a store that can tell raises
        `FileExistsError` for anything else. None for whatever is there.
        retract: whether it is removed again when it turns out that its writer was taken for dead meanwhile, unless it
        has replaced something. (Where there are locks, it never is.)
        The name under which it was created is gone when it overwrites; else it may remain beside the other.
        """
        ...

    def is_at(self, path: str) -> bool:
        """Whether a path leads to this very file or object. Raises `OSError` where that cannot be known."""
        ...

    def close(self) -> None:
        """Lets go of it, as it is."""
        ...


class Writer(Protocol):
    """A file that is written from one end to the other."""

    @property
    def size(self) -> int:
        """The number of bytes so far."""
        ...

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        ...


class Lease(Protocol):
    """The right to write a run."""

    lost: bool  # taken over by another one of this process

    def acquire(self) -> None:
        """Takes it unless it is held. Raises `ExistsError` with the holder's name, `MismatchError` when it is lost."""
        ...

    def check_free(self) -> None:
        """Raises `ExistsError` with the name of another process that holds it, if that is known; takes nothing."""
        ...

    def release(self) -> None:
        """Gives it up."""
        ...


# The files in a folder, by their paths within it, that are part of a checkpoint of some format.
Owned = Callable[["Store", str], Collection[str]]
Beside = Callable[["Store", str, Sequence[str]], None]  # raises `ExistsError` for files in a folder that are in the way


class Store(Protocol):
    """Names and bytes. Errors are `OSError`s as a file system raises them.

    A store without folders takes the beginnings of names for them: they need not be made.
    """

    @property
    def has_folders(self) -> bool:
        """Whether folders exist by themselves, and lie in others that do."""
        ...

    @property
    def has_locks(self) -> bool:
        """Whether a writer that does not move is known to live, however long; else it counts as dead after a while."""
        ...

    @property
    def object_bytes(self) -> int | None:
        """The most bytes that a file should have, so that several are written at a time; None for no limit."""
        ...

    # Reading

    def stat(self, path: str) -> Stat | None:
        """What is at a path; None when nothing is there."""
        ...

    def list(self, path: str) -> list[str]:
        """The names in a folder, sorted; none when it does not exist."""
        ...

    def open(self, path: str, *, expected: int = 0, into: memoryview | None = None) -> Blob:
        """Opens a file. Raises `CorruptError` for what is no file.

        expected: how many of its first bytes are about to be read, for stores that would bring them at once.
        into: memory for the last of these. A store may bring them there, and `Blob.take` then gives that very memory.
            Until then it is the blob's, which nobody but the opener may use: others would take it for theirs.
        """
        ...

    def glance(self, path: str) -> AbstractContextManager[None]:
        """Lets `stat` and `list` answer from one look at a folder, while the `with` block runs.

        Stores where each question takes long look at all that is below, unless that is too much, and remember what
        else they were asked about it, the beginnings of files that were opened among it. Opening a file that was
        replaced since it was seen is a `ReplacedError`, unless it is `expected` to have a certain size.
        """
        ...

    def is_local(self, path: str) -> bool:
        """Whether what is read there comes from this host: its disk or its memory. False where that is not known."""
        ...

    def is_link(self, path: str) -> bool:
        """Whether a path is a link to another."""
        ...

    def real_path(self, path: str) -> str:
        """The path without links."""
        ...

    def tensorstore(self, path: str, context: Any, *, writes: bool = False) -> dict[str, Any]:
        """TensorStore's specification of the files in a folder, to be opened in a `tensorstore.Context`.

        A store that TensorStore cannot reach itself brings them into the memory of that context, at least where it
        `writes`.
        """
        ...

    def written_by_tensorstore(self, path: str, context: Any, which: Callable[[str], bool]) -> None:
        """Takes in what TensorStore has written into a folder, unless it has written into the store itself.

        which: of the files, by their paths within the folder; TensorStore cannot read these again.
        """
        ...

    # Writing

    def create(self, path: str, *, visible: bool = False, expected: int = 0) -> Sink:
        """A new file. Raises `FileExistsError` when there is one.

        visible: others see it, and that its writer lives, from now on until it is published or deleted. Other files are
        seen when they are finished at the latest, and only then may there be the `FileExistsError`.
        expected: about how many bytes it will have, where that is known.
        """
        ...

    def delete(self, path: str) -> None:
        """Removes a file. Some stores raise `FileNotFoundError` when there is none."""
        ...

    def delete_all(self, path: str, names: Iterable[str]) -> None:
        """Removes the files of these names in a folder that are there. Raises the first error after trying all."""
        ...

    def is_in_use(self, path: str) -> bool:
        """Whether a living writer has a file. Raises `FileNotFoundError`."""
        ...

    def delete_unused(self, path: str, check: Callable[[], bool]) -> bool:
        """Removes a file unless a living writer has it.

        `check` is asked when no writer can begin to use it any more, whether it may be removed. False where it
        cannot be known whether the writer lives.
        """
        ...

    def remove_leftover(self, path: str) -> None:
        """Removes what a killed writer has left under a temporary name, and nothing whose writer lives."""
        ...

    def make_folder(self, path: str) -> None:
        """Makes a folder. Raises `FileExistsError`."""
        ...

    def make_folders(self, path: str, made: "list[str]") -> None:
        """Makes a folder and those above it where they are missing, durably; `made` gets the ones that it made."""
        ...

    def remove_folder(self, path: str) -> None:
        """Removes an empty folder. Raises `OSError` for one with contents."""
        ...

    def settle(self, path: str) -> None:
        """Makes the names in a folder durable: those that were given, and that others were removed.

        A file that was finished may still be on its way until then: what was wrong with it is raised here.
        """
        ...

    def move(self, old: str, new: str, *, last: str) -> None:
        """Moves a folder to a name that is free. Raises `FileExistsError` and `FileNotFoundError`.

        A store that cannot do it in one step copies the files, that of the name `last` after all others, and removes
        the old ones, that one first: a folder with such a file is at every moment whole.
        """
        ...

    def new_file(self, path: str, *, overwrite: bool) -> AbstractContextManager[Writer]:
        """Yields a file to write within a `with` block; at its end it is in place, after an error it never was.

        Raises `ExistsError` for what is there, unless it is a file that is to be overwritten, and `TakenOverError` in a
        run that another job may have taken over by now.
        """
        ...

    def new_folder(
        self,
        path: str,
        *,
        overwrite: bool,
        owned: Owned,
        names: Collection[str] = (),
        beside: Beside | None = None,
    ) -> AbstractContextManager[str]:
        """Yields a folder to fill within a `with` block; at its end it is in place, after an error it never was.

        owned: the files in the old folder that are part of what is replaced. Other files are kept. Raises `ExistsError`
        for other folders, which may be anything, and for other files whose `names` the new one needs or that must not
        lie `beside` it.
        """
        ...

    def scratch_folder(self, path: str) -> AbstractContextManager[str]:
        """Yields a folder beside a path, removed after the `with` block, or by the next writer after a kill."""
        ...

    def lease(self, run: str, busy: Callable[[], bool] = lambda: False) -> Lease:
        """The right to write a run, to be acquired. One that is `busy` is not taken over within a process."""
        ...
