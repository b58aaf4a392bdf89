"""Test doubles of disks and readers, which count operations or fail at a chosen one."""

import contextlib
import ctypes
import errno
import gc
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from .._core.boxes import Box, box_shape
from .._core.entries import ArrayEntry
from .._core.skeleton import LEAF, Node
from .._core.source import Source
from ..formats._shared.reader import ForeignReader
from ..stores.posix import PAGE, Disk

_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_LOOKING = (
    *("stat", "list", "lock", "lock_shared", "same_file", "close", "open", "open_dir"),
    *("size", "has_holes", "read", "map", "populate", "is_local"),
)
_ANSWERS = {"lock": None, "lock_shared": None, "is_local": False}  # results of operations that hide errors


class QuickDisk(Disk):
    """A disk that makes nothing durable. Tests cannot see the difference, and it saves most of their time."""

    def sync(self, fd: int) -> None: ...

    def sync_dir(self, path: str) -> None: ...


class BottomlessDisk(QuickDisk):
    """A disk that discards all bytes that are written to it."""

    def write(self, fd: int, data: memoryview, offset: int) -> None: ...

    def preallocate(self, fd: int, size: int) -> None: ...


class HeldDisk(Disk):
    """A disk that creates no file until the event `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def create(self, path: str) -> int:
        assert self.go.wait(30)
        return super().create(path)


class CountingDisk(QuickDisk):
    """Counts the bytes read from files, in `nbytes`."""

    def __init__(self) -> None:
        self.nbytes = 0

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        found = super().read(fd, buffer, offset)
        self.nbytes += found
        return found

    def populate(self, fd: int, mapped: Any, offset: int, size: int) -> bool:
        self.nbytes += size
        return super().populate(fd, mapped, offset, size)


class LedgerDisk(QuickDisk):
    """A disk that tracks what a power cut would lose.

    `placed` is True once a link or rename has put a file at `path` or in it. `early` lists the files that were not
    durable at that moment. `unsettled` has the directories with a new name that is not durable.
    """

    def __init__(self, path: str) -> None:
        self.placed = False
        self.early: list[str] = []
        self.unsettled: set[str] = set()
        self._path = path
        self._names: dict[int, str] = {}
        self._durable = _all_of(path)

    def create(self, path: str) -> int:
        return self._opened(super().create(path), path)

    def open(self, path: str) -> int:
        return self._opened(super().open(path), path)

    def _opened(self, fd: int, path: str) -> int:
        self._names[fd] = path
        return fd

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        self._durable.discard(self._names[fd])
        super().write(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._durable.discard(self._names[fd])
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._durable.add(self._names[fd])

    def sync_dir(self, path: str) -> None:
        self._durable.add(path)
        self.unsettled.discard(path)

    def link(self, old: str, new: str) -> None:
        self._place(old, new)
        super().link(old, new)

    def rename(self, old: str, new: str) -> None:
        self._place(old, new)
        super().rename(old, new)

    def rename_new(self, old: str, new: str) -> None:
        self._place(old, new)
        super().rename_new(old, new)

    def exchange(self, a: str, b: str) -> bool:
        self._place(a, b)
        return super().exchange(a, b)

    def _place(self, old: str, new: str) -> None:
        """Records that `old` gets the name `new`. If `new` is in the checkpoint, all its files must be durable."""
        inside = os.path.dirname(new) == self._path
        if new == self._path or inside:
            self.placed = True
            self.unsettled.add(os.path.dirname(new))
            self.early += sorted(_all_of(self._path if inside else old) - self._durable)


def _all_of(path: str) -> set[str]:
    """Returns a file, or a directory with everything below it; nothing if the path does not exist."""
    if not os.path.isdir(path):
        return {path} if os.path.exists(path) else set()
    return {path, *(os.path.join(base, name) for base, dirs, files in os.walk(path) for name in dirs + files)}


class ForbiddenDisk(QuickDisk):
    """A disk on which opening and listing raise `PermissionError`."""

    def open(self, path: str) -> int:
        raise PermissionError(errno.EACCES, "injected: permission denied", path)

    def list(self, path: str) -> list[str]:
        raise PermissionError(errno.EACCES, "injected: permission denied", path)


class SteppedDisk(QuickDisk):
    """A disk that numbers its operations and runs each through `step`.

    looking: includes operations that change nothing.
    """

    def __init__(self, *, looking: bool = False):
        self.count, self._looking = 0, looking
        self._counting = threading.Lock()

    def step(self, number: int, name: str, operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs the operation with this number, counted from 1. Subclasses change it or make it fail."""
        return operation(*args)


def _stepped(name: str) -> Callable[..., Any]:
    def operation(self: SteppedDisk, *args: Any) -> Any:
        real = getattr(super(SteppedDisk, self), name)
        if name in _LOOKING and not self._looking:
            return real(*args)
        with self._counting:
            self.count += 1
            number = self.count
        return self.step(number, name, real, args)

    return operation


for _name, _value in vars(Disk).items():
    if not _name.startswith("_") and callable(_value):
        setattr(SteppedDisk, _name, _stepped(_name))


class FailingDisk(SteppedDisk):
    """A disk whose operation number `at` fails. With `lasting`, all later ones fail too.

    `failed` names the failed operations. `log` has all operations with their first argument.
    """

    def __init__(self, at: int = 0, code: int = errno.EIO, *, lasting: bool = False, looking: bool = False):
        super().__init__(looking=looking)
        self.at, self.code, self._lasting = at, code, lasting
        self.failed: list[str] = []
        self.log: list[tuple[str, Any]] = []

    def step(self, number: int, name: str, operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        first = args[0] if isinstance(args[0], str | int) else None  # The log must not keep a mapping alive.
        self.log.append((name, first))
        if number != self.at and not (self._lasting and number > self.at > 0):
            return operation(*args)
        self.failed.append(name)
        if name in _ANSWERS:
            return _ANSWERS[name]
        if name == "close":  # The system closes a file even if it reports an error.
            operation(*args)
        raise OSError(self.code, f"injected: {os.strerror(self.code)}")


class SignallingDisk(SteppedDisk):
    """A disk that sends its own process a signal at operation number `at`: before it, after it, or halfway through.

    Only writes can be interrupted halfway.
    """

    def __init__(self, at: int, when: Literal["before", "within", "after"], number: int):
        super().__init__(looking=True)
        self._at, self._when, self._number = at, when, number

    def step(self, number: int, name: str, operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if number != self._at:
            return operation(*args)
        if self._when == "after":
            try:
                return operation(*args)
            finally:  # Also after an operation that fails, such as opening a missing file.
                os.kill(os.getpid(), self._number)
        if self._when == "within" and name == "write":
            fd, data, offset = args
            operation(fd, data[: len(data) // PAGE // 2 * PAGE], offset)
        os.kill(os.getpid(), self._number)
        return operation(*args)


def interrupted(reader: Source, at: int, action: Callable[[], Any]) -> Any:
    """Returns a source that calls `action` before it reads box number `at`, counted from 1."""
    return _Interrupted(reader, at, action)


class _Interrupted:
    def __init__(self, reader: Source, at: int, action: Callable[[], Any]):
        self._reader, self._at, self._action = reader, at, action
        self._count = 0
        self._counting = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read(self, wanted: Sequence[tuple[ArrayEntry, Box]], **options: Any) -> list[np.ndarray]:
        with self._counting:
            now = self._count < self._at <= self._count + len(wanted)
            self._count += len(wanted)
        if now:
            self._action()
        return self._reader.read(wanted, **options)


class Ones:
    """An array of ones that takes memory only for the boxes that are read."""

    def can_map(self) -> bool:
        return False

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        return np.ones(box_shape(box), np.float32)


def ones(shape: tuple[int, ...]) -> Source:
    """Returns a checkpoint with one array `w` of float32, which takes no memory."""
    entry = ArrayEntry("w", "numpy", "float32", shape)
    return ForeignReader("ones", "/ones", [entry], {"w": Ones()}, skeleton=[Node("dict", "", ["w"]), LEAF])


@contextlib.contextmanager
def memory_bounded(limit: int) -> Iterator[bool]:
    """Fails if the memory of the process grows by more than `limit` bytes at any time in the `with` block.

    Yields True if it can measure the memory, which works only on Linux.
    """
    gc.collect()
    try:
        with open("/proc/self/clear_refs", "w") as file:
            _return_large_blocks()
            file.write("5")  # This resets the peak that the system records as VmHWM.
        before = _status("VmRSS")
    except OSError:
        yield False
        return
    yield True
    taken = _status("VmHWM") - before
    assert taken <= limit, f"it took {taken >> 20} MiB of memory, {limit >> 20} MiB are allowed"


def _return_large_blocks() -> None:
    """Makes the C library return large blocks to the system as soon as they are freed.

    By default, glibc keeps freed blocks for each thread. The libraries of some formats use a varying number of threads,
    so the measured memory would differ by two hundred megabytes between runs without any leak.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        found = re.search(rf"^{name}:\s+(\d+) kB", file.read(), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {name}")
    return int(found[1]) << 10


class TooSlowError(BaseException):
    """The error of `in_time`. It is not an `Exception`, so that the tested code does not catch it."""


@contextlib.contextmanager
def in_time(seconds: float) -> Iterator[None]:
    """Fails if the `with` block takes longer. It works only in the main thread, on systems with signals."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*args: Any) -> None:
        raise TooSlowError(f"expected an end within {seconds} seconds")

    handler = signal.signal(signal.SIGALRM, stop)
    before = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)
