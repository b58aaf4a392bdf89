"""A file that is open for reading, at offsets or as memory."""

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

from .._threads.forks import free_in_children
from .._threads.pool import in_parallel
from .._threads.thread import if_free
from ..errors import CorruptError
from .buffers import Range, claim_range
from .posix import Disk
from .read_errors import ReplacedError, raise_read_error

_DEFAULT_AWAKE = 256  # watched files that stay open, where the system says no limit
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
        self._users = 0  # of the descriptor of a watched file, now
        self._asleep: tuple[int, int] | None = None  # the device and number of a watched file that is closed meanwhile
        # The mapping that callers share, and the ranges that they have, ascending.
        self._last_mapping: tuple[weakref.ref[mmap.mmap] | None, list[Range]] | None = None
        self._lock, self._is_mapping = free_in_children(threading.RLock()), False

    @property
    def local(self) -> bool:
        if self._is_local is None:
            with self._descriptor() as fd:
                self._is_local = self._disk.is_local(fd)
        return self._is_local

    @property
    def has_holes(self) -> bool:
        with self._descriptor() as fd:
            return self._disk.has_holes(fd)

    def watch(self) -> None:
        """Lets reading raise `ReplacedError` once a program writes into the file in place.

        Otherwise bytes of two versions could form one array. If a process has many watched files, those that were
        opened first sleep: they are closed, and opened again when they are read, unless another file has their name.
        """
        self._version = self._disk.version(self._fd)
        _limit_awake(self)

    def _check_version(self, fd: int) -> None:
        if self._version is not None and self._disk.version(fd) != self._version:
            raise ReplacedError(f"{self.path}: another program wrote into it while it was open; open it again")

    def _descriptor(self) -> AbstractContextManager[int]:
        """Yields the descriptor. A watched file does not fall asleep meanwhile."""
        return contextlib.nullcontext(self._fd) if self._version is None else self._watched_descriptor()

    @contextlib.contextmanager
    def _watched_descriptor(self) -> Iterator[int]:
        with self._lock:
            if self._asleep:
                self._wake(self._asleep)
            self._users += 1
        try:
            yield self._fd
        finally:
            with self._lock:
                self._users -= 1

    def _wake(self, identity: tuple[int, int]) -> None:
        try:
            fd = self._disk.open(self.path)
        except FileNotFoundError:
            raise ReplacedError(f"{self.path}: deleted since it was opened; open it again") from None
        if _identity(fd) != identity:
            self._disk.close(fd)
            raise ReplacedError(f"{self.path}: another file has its name since it was opened; open it again")
        self._fd, self._close = fd, weakref.finalize(self, _close_quietly, self._disk, fd)
        self._asleep = None
        _limit_awake(self)

    def sleep(self) -> bool:
        """Closes a watched file until it is read. Returns False if it is in use, or was closed.

        It does not wait: the thread that uses the file may be waiting for the caller's file.
        """
        return if_free(self._lock, self._sleep)

    def _sleep(self) -> bool:
        if self._users or self._asleep or not self._close.alive:
            return False
        self._asleep = _identity(self._fd)
        self._close()
        return True

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fills a buffer from an offset. Raises `CorruptError` if the file ends earlier or cannot be read."""
        try:
            with self._descriptor() as fd:
                count = self._disk.read(fd, target, offset)
                self._check_version(fd)
                if count != len(target):
                    raise self._cut_short(offset + len(target))
        except OSError as error:
            raise_read_error(error, self.path)

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
        with self._descriptor() as fd:
            buffer = bytearray(min(nbytes, self._disk.size(fd)))
            return bytes(memoryview(buffer)[: self._disk.read(fd, memoryview(buffer), 0)])

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
        try:
            with self._descriptor() as fd:
                self._check_version(fd)
                if self._disk.size(fd) < self.size:
                    raise self._cut_short(self.size)
                return self._mapping(fd, ranges)
        except OSError as error:
            raise_read_error(error, self.path)

    def _mapping(self, fd: int, ranges: Sequence[Range]) -> mmap.mmap | None:
        with self._lock:
            nested = self._is_mapping  # A signal handler interrupted this method: it gets a mapping of its own.
            try:
                self._is_mapping = True
                if not nested and (shared := self._shared_mapping(ranges)):
                    return shared
                found = self._disk.map(fd, self.size)
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
        with self._descriptor() as fd:
            in_parallel(chunks, lambda chunk: self._populate(fd, mapped, *chunk))
            self._check_version(fd)

    def _populate(self, fd: int, mapped: mmap.mmap, begin: int, end: int) -> None:
        try:
            if not self._disk.populate(fd, mapped, begin, end - begin):
                raise self._cut_short(end)
        except OSError as error:
            raise_read_error(error, self.path)

    def _cut_short(self, expected: int) -> CorruptError:
        return CorruptError(f"{self.path}: expected {expected} bytes, found fewer; it was cut short while open")


# The watched files that are awake, in the order in which they were opened.
_awake: "dict[int, weakref.ref[File]]" = {}
_awake_lock = free_in_children(threading.RLock())  # A signal handler may open files, too.


def _limit_awake(file: File) -> None:
    """Notes a watched file that has just been opened. Lets the first ones sleep if this process has many."""
    with _awake_lock:
        _awake.pop(id(file), None)  # of a file that is gone
        _awake[id(file)] = weakref.ref(file)
        if len(_awake) <= _max_awake():
            return
        known = list(_awake.items())
        found = [(number, other) for number, one in known if (other := one()) is not None]
        gone = {number for number, _ in known}.difference(number for number, _ in found)
        asleep = {number for number, other in found[: -_max_awake()] if other is not file and other.sleep()}
        for number in gone | asleep:
            del _awake[number]


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _max_awake() -> int:
    """Returns a quarter of the files that this process may open."""
    try:
        import resource
    except ImportError:  # Windows
        return _DEFAULT_AWAKE
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft // 4, 1) if soft > 0 else _DEFAULT_AWAKE


def _close_quietly(disk: Disk, fd: int) -> None:
    with contextlib.suppress(OSError):  # The file was only read, and a finalizer has no caller to raise this to.
        disk.close(fd)
