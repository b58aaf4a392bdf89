"""A file that is open for reading: at offsets, or as memory."""

import contextlib
import mmap
import threading
import weakref
from collections.abc import Iterable, Sequence

from .._threads.pool import in_parallel
from ..errors import CorruptError
from .posix import Disk
from .ranges import Range, take
from .read_errors import reading

_CHUNK = 4 << 20  # bytes of a mapping that are brought in at a time


class File:
    """A file that stays open, so that it can be read even after it was replaced or deleted. See `stores.store.Blob`."""

    readers, read_bytes = 4, 4 << 20

    def __init__(self, disk: Disk, path: str):
        self.path = path
        self._disk = disk
        self._fd = disk.open(path)
        self._close = weakref.finalize(self, _let_go, disk, self._fd)
        try:
            self.size = disk.size(self._fd)
        except BaseException:  # which may keep this object alive
            self._close()
            raise
        self._local: bool | None = None
        self._shared: tuple[weakref.ref[mmap.mmap] | None, list[Range]] | None = None  # its taken ranges, ascending
        self._taking, self._busy = threading.RLock(), False

    @property
    def local(self) -> bool:
        if self._local is None:
            self._local = self._disk.is_local(self._fd)
        return self._local

    @property
    def has_holes(self) -> bool:
        return self._disk.has_holes(self._fd)

    def read_into(self, target: memoryview, offset: int, *, anew: bool = False) -> None:
        """Fills a buffer from an offset. Raises `CorruptError` when the file ends before, or cannot be read."""
        with reading(self.path):
            if self._disk.read(self._fd, target, offset) != len(target):
                raise self._cut_short(offset + len(target))

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the file. Raises `CorruptError` when it ends before; no memory is reserved for the missing size."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise CorruptError(f"{self.path}: expected {offset + nbytes} bytes, found {self.size}; it is cut short")
        data = bytearray(nbytes)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def read_up_to(self, nbytes: int) -> bytes:
        """The first bytes, or all where there are fewer."""
        buffer = bytearray(min(nbytes, self._disk.size(self._fd)))
        return bytes(memoryview(buffer)[: self._disk.read(self._fd, memoryview(buffer), 0)])

    def close(self) -> None:
        """Closes it; an object that is collected is closed, too."""
        self._close()

    def take(self, ranges: Sequence[Range]) -> list[memoryview] | None:
        return None

    def forget(self) -> None: ...

    def mapped(self, ranges: Sequence[Range]) -> mmap.mmap | None:
        """Private memory with the whole file, of which the caller gets these merged ranges; None where that is refused.

        All callers share one mapping while any of them holds it, for each takes a descriptor or one of the 65,530
        mappings that Linux allows a process. But no caller may see what another writes into its arrays: bytes that were
        handed out before come from another mapping. The pages are still to be read: see `bring_in`.
        """
        with reading(self.path):
            if self._disk.size(self._fd) < self.size:
                raise self._cut_short(self.size)
        with self._taking:
            nested = self._busy  # a signal handler came in the middle: its bytes come from a mapping of its own
            try:
                self._busy = True
                if not nested and (shared := self._share(ranges)):
                    return shared
                found = self._disk.map(self._fd, self.size)
                if not nested:
                    self._shared = weakref.ref(found), list(ranges)
                return found
            except (OSError, ValueError, OverflowError, MemoryError):
                return None  # no room for addresses, no descriptor, or a file system without; there are other ways
            finally:
                self._busy = nested

    def _share(self, ranges: Sequence[Range]) -> mmap.mmap | None:
        """The mapping that other callers have, if none of them has a byte of these ranges."""
        mapping, taken = self._shared or (None, [])
        found = mapping and mapping()
        taken = list(taken)
        if found is None or not all(take(taken, begin, end) for begin, end in ranges):
            return None
        self._shared = mapping, taken  # at once, for an interrupt must not leave half of it
        return found

    def bring_in(self, mapped: mmap.mmap, begin: int, end: int) -> None:
        """Reads a range of a mapping once. Raises `CorruptError` for pages that would raise a signal when accessed."""
        with reading(self.path):
            if not self._disk.populate(self._fd, mapped, begin, end - begin):
                raise self._cut_short(end)

    def bring_all_in(self, mapped: mmap.mmap, ranges: Iterable[Range]) -> None:
        """Reads several ranges of a mapping once, in parallel. Raises `CorruptError` as `bring_in` does."""
        chunks = [(at, min(at + _CHUNK, end)) for begin, end in ranges for at in range(begin, end, _CHUNK)]
        in_parallel(chunks, lambda chunk: self.bring_in(mapped, *chunk))

    def _cut_short(self, expected: int) -> CorruptError:
        return CorruptError(f"{self.path}: expected {expected} bytes, found fewer; it was cut short while open")


def _let_go(disk: Disk, fd: int) -> None:
    with contextlib.suppress(OSError):  # the file was only read, and there is no caller to raise this to
        disk.close(fd)
