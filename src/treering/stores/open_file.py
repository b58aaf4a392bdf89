"""A file that is open for reading, at offsets or as memory."""

import contextlib
import mmap
import threading
import weakref
from collections.abc import Iterable, Sequence

from .._threads.forks import free_in_children
from .._threads.pool import in_parallel
from ..errors import CorruptError
from .posix import Disk
from .ranges import Range, claim_range
from .read_errors import ReplacedError, reading

_POPULATE_CHUNK_BYTES = 4 << 20  # bytes of a mapping that are read at a time


class File:
    """A file that stays open, so it can be read even after it was replaced or deleted. See `stores.store.Blob`."""

    readers, read_bytes = 4, 4 << 20

    def __init__(self, disk: Disk, path: str):
        self.path = path
        self._disk = disk
        self._fd = disk.open(path)
        self._close = weakref.finalize(self, _close_quietly, disk, self._fd)
        try:
            self.size = disk.size(self._fd)
        except BaseException:  # its traceback may keep this object alive
            self._close()
            raise
        self._is_local: bool | None = None
        self._version: tuple[int, int] | None = None  # when it was opened, if it is watched
        # The mapping that callers share, and the ranges that they have, ascending.
        self._last_mapping: tuple[weakref.ref[mmap.mmap] | None, list[Range]] | None = None
        self._mapping_lock, self._is_mapping = free_in_children(threading.RLock()), False

    @property
    def local(self) -> bool:
        if self._is_local is None:
            self._is_local = self._disk.is_local(self._fd)
        return self._is_local

    @property
    def has_holes(self) -> bool:
        return self._disk.has_holes(self._fd)

    def watch(self) -> None:
        """Lets reading raise `ReplacedError` once a program writes into the file in place.

        Otherwise bytes of two versions could form one array.
        """
        self._version = self._disk.version(self._fd)

    def _check_version(self) -> None:
        if self._version is not None and self._disk.version(self._fd) != self._version:
            raise ReplacedError(f"{self.path}: another program wrote into it while it was open; open it again")

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fills a buffer from an offset. Raises `CorruptError` if the file ends earlier or cannot be read."""
        with reading(self.path):
            count = self._disk.read(self._fd, target, offset)
            self._check_version()
            if count != len(target):
                raise self._cut_short(offset + len(target))

    def read_again(self, target: memoryview, offset: int) -> None:
        self.read_into(target, offset)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Returns bytes of the file. Raises `CorruptError` if it ends earlier, before it reserves memory for them."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise CorruptError(f"{self.path}: expected {offset + nbytes} bytes, found {self.size}; it is cut short")
        data = bytearray(nbytes)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def read_up_to(self, nbytes: int) -> bytes:
        """Returns the first `nbytes` bytes, or all if the file has fewer."""
        buffer = bytearray(min(nbytes, self._disk.size(self._fd)))
        return bytes(memoryview(buffer)[: self._disk.read(self._fd, memoryview(buffer), 0)])

    def close(self) -> None:
        """Closes the file. Garbage collection closes it too."""
        self._close()

    def take(self, ranges: Sequence[Range]) -> list[memoryview] | None:
        return None

    def forget(self) -> None: ...

    def mapped(self, ranges: Sequence[Range]) -> mmap.mmap | None:
        """Returns a private mapping of the file for use in these merged ranges; None if the file cannot be mapped.

        Callers share one mapping while any of them holds it. Each mapping takes a descriptor, and one of the 65,530
        mappings that Linux allows a process. But a caller must not see what another writes into its arrays. So bytes
        that a caller already has come from another mapping. The pages are not read yet: see `populate`.
        """
        with reading(self.path):
            self._check_version()
            if self._disk.size(self._fd) < self.size:
                raise self._cut_short(self.size)
        with self._mapping_lock:
            nested = self._is_mapping  # A signal handler interrupted this method: it gets a mapping of its own.
            try:
                self._is_mapping = True
                if not nested and (shared := self._shared_mapping(ranges)):
                    return shared
                found = self._disk.map(self._fd, self.size)
                if not nested:
                    self._last_mapping = weakref.ref(found), list(ranges)
                return found
            except (OSError, ValueError, OverflowError, MemoryError):
                return None  # no address space, no descriptor or no support for mappings; the caller reads instead
            finally:
                self._is_mapping = nested

    def _shared_mapping(self, ranges: Sequence[Range]) -> mmap.mmap | None:
        """Returns the mapping of other callers if none of them has a byte of these ranges."""
        mapping, taken = self._last_mapping or (None, [])
        found = mapping and mapping()
        taken = list(taken)
        if found is None or not all(claim_range(taken, begin, end) for begin, end in ranges):
            return None
        self._last_mapping = mapping, taken  # one assignment: an interrupt must not leave half of the ranges
        return found

    def populate(self, mapped: mmap.mmap, ranges: Iterable[Range]) -> None:
        """Reads ranges of a mapping once, in parallel.

        Raises `CorruptError` for pages that would raise a signal on access.
        """
        chunks = [
            (at, min(at + _POPULATE_CHUNK_BYTES, end))
            for begin, end in ranges
            for at in range(begin, end, _POPULATE_CHUNK_BYTES)
        ]
        in_parallel(chunks, lambda chunk: self._populate(mapped, *chunk))
        self._check_version()

    def _populate(self, mapped: mmap.mmap, begin: int, end: int) -> None:
        with reading(self.path):
            if not self._disk.populate(self._fd, mapped, begin, end - begin):
                raise self._cut_short(end)

    def _cut_short(self, expected: int) -> CorruptError:
        return CorruptError(f"{self.path}: expected {expected} bytes, found fewer; it was cut short while open")


def _close_quietly(disk: Disk, fd: int) -> None:
    with contextlib.suppress(OSError):  # The file was only read, and a finalizer has no caller to raise this to.
        disk.close(fd)
