"""One writer at a time for a run: a locked file that says who it is."""

import contextlib
import datetime
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from ..errors import ExistsError, MismatchError, SaveError, UnsupportedError
from .posix import Disk
from .whole_files import make_dirs

NAME = "writer.lock"  # a killed writer's stays; its lock is what counts
_VERSION = 1
_MAX_OWN_BYTES = 4096  # bytes that no file of this version has
_MAX_READ_BYTES = 1 << 20  # bytes of it that are read
_alive: "weakref.WeakSet[WriterLock]" = weakref.WeakSet()
_log = logging.getLogger("treering")
_taking = threading.RLock()  # within this process one lock is taken, or taken over, at a time


class _Held(NamedTuple):
    fd: int
    path: str
    made: list[str]  # directories that were missing


class _Envelope(msgspec.Struct):
    version: Any = _VERSION
    requires: Any = ()


class WriterLock:
    """The right to write a run. A process that ends, in whatever way, gives it back.

    Within a process the newest claim counts: a notebook's cell that failed has closed nothing, and the next one is to
    go on. A lock whose owner says by `busy` that it is needed is not taken over; one that was is lost for good.
    """

    def __init__(self, disk: Disk, run: str, busy: Callable[[], bool] = lambda: False):
        self._disk, self._run, self._busy = disk, run, busy
        self.lost = False  # to another of this process
        self._held: list[_Held] = []  # one, from the moment on in which it is locked
        weakref.finalize(self, _give_back, disk, self._held)
        _alive.add(self)

    def acquire(self) -> None:
        """Takes the lock unless it is held already, and makes the run's directory.

        Raises `ExistsError` that says who else has it, and `MismatchError` when it was taken over. Where files cannot
        be locked, everybody may write.
        """
        with _taking:
            if self.lost:
                raise MismatchError(
                    f"{self._run}: another Checkpointer of this process has taken this run over; save with that one"
                )
            if self._held:
                return
            try:
                self._take_over()
                self._acquire()
            except (ExistsError, UnsupportedError):
                raise
            except OSError as error:
                raise SaveError(f"{self._run}: the run cannot be made ready for writing: {error}") from error

    def _take_over(self) -> None:
        """Takes the lock away from an idle owner in this process. Raises `ExistsError` for one that is saving."""
        path = os.path.join(self._run, NAME)
        for other in list(_alive):
            if other is self or not other._holds(path):
                continue
            if other._busy():
                raise ExistsError(
                    f"{self._run}: another Checkpointer of this process is saving; call its wait() or close(), or try "
                    "again when the save is over"
                )
            _log.warning("%s: taken over from another Checkpointer of this process, which was not closed", self._run)
            other.lost = True
            other.release()

    def _holds(self, path: str) -> bool:
        """Whether this is the lock of the run in which the file is."""
        with contextlib.suppress(OSError):
            return any(self._disk.same_file(held.fd, path) for held in self._held)
        return False

    def _acquire(self) -> None:
        path = os.path.join(self._run, NAME)
        made: list[str] = []
        try:
            fd = self._locked(path, made)
            with contextlib.suppress(OSError):  # a full disk: nobody will know who it is, that is all
                self._disk.truncate(fd, 0)
                self._disk.write(fd, memoryview(_word()), 0)
            self._disk.sync(fd)  # or other hosts would not see it
        except BaseException:
            _give_back(self._disk, self._held)
            _remove_empty(self._disk, made)
            raise

    def _locked(self, path: str, made: list[str]) -> int:
        """The open file, locked; the directories that were missing are added to `made`."""
        while True:
            make_dirs(self._disk, self._run, made)
            fd = self._disk.open_shared(path)
            try:
                locked = self._disk.lock(fd)
                if locked is False:
                    raise ExistsError(
                        f"{self._run}: {_holder(self._disk, fd)} writes this run; wait for it to end, or stop it, or "
                        "choose another run (reading needs no Checkpointer: treering.open, treering.follow). If its "
                        f"host is dead, a server may keep the lock for ever (NFSv3 does): then remove {path}"
                    )
                if locked is None:
                    _log.warning(
                        "%s: another job may write this run at the same time, which would harm both: files cannot be "
                        "locked on this file system; mount it with locks (Lustre: -o flock)",
                        self._run,
                    )
                self._held.append(_Held(fd, path, made))
                if self._disk.same_file(fd, path):
                    _check_version(self._disk, fd, path)
                    return fd
            except BaseException as error:
                if isinstance(error, UnsupportedError):  # it is locked, and is not ours to remove all the same
                    self._held.clear()
                if not self._held:  # the file is another's
                    self._disk.close(fd)
                raise
            self._held.pop()  # the one before has removed it by now
            self._disk.close(fd)

    def release(self) -> None:
        """Gives the lock back."""
        _give_back(self._disk, self._held)

    def forget(self) -> None:
        """Leaves the lock to the process that this one was forked from."""
        while self._held:
            self._disk.close(self._held.pop().fd)


def _give_back(disk: Disk, held: list[_Held]) -> None:
    while True:
        try:  # two threads may give it back
            fd, path, made = held.pop()  # first, or a file that later gets this number would be closed by the next call
        except IndexError:
            return
        with contextlib.suppress(OSError):
            if disk.same_file(fd, path):  # or the run was removed and made again, and this is the lock of another
                disk.unlink(path)
        with contextlib.suppress(OSError):
            disk.close(fd)
        _remove_empty(disk, made)


def _remove_empty(disk: Disk, made: list[str]) -> None:
    """Takes away the directories that were made for a run in which nothing has been saved."""
    with contextlib.suppress(OSError):
        for directory in reversed(made):
            disk.remove_dir(directory)


def _word() -> bytes:
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"version": _VERSION, "host": socket.gethostname(), "process": os.getpid(), "since": since}
    return msgspec.json.encode(about)


def _check_version(disk: Disk, fd: int, path: str) -> None:
    """Raises `UnsupportedError` when a later release has left the file: what its lock means then is not known."""
    data = _read(disk, fd)
    try:
        found = msgspec.json.decode(data, type=_Envelope)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        if len(data) < _MAX_OWN_BYTES:  # empty, or cut off when its writer was killed
            return
        what = f"{disk.size(fd)} bytes that are not understood"
    else:
        if type(found.version) is int and found.version == _VERSION and not found.requires:
            return
        requires = f" that requires {found.requires!r:.100}" if found.requires else ""
        what = f"version {found.version!r:.100}{requires}"
    raise UnsupportedError(
        f"{path}: expected version {_VERSION} of this file, found {what}; a later release "
        "of treering writes this run: upgrade treering, or make sure that no job writes it and remove the file"
    )


def _read(disk: Disk, fd: int) -> bytes:
    buffer = bytearray(min(disk.size(fd), _MAX_READ_BYTES))
    return bytes(buffer[: disk.read(fd, memoryview(buffer), 0)])


def _holder(disk: Disk, fd: int) -> str:
    try:
        word = msgspec.json.decode(_read(disk, fd), type=dict[str, str | int])
        return f"process {word['process']} on {word['host']}, since {word['since']},"
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, KeyError):  # it has only just got it, or let go of it
        return "another process"


def _let_go_after_fork() -> None:
    """A child shares its parent's lock, and would hold on to it when the parent is dead."""
    global _taking
    _taking = threading.RLock()  # or that of a thread which is not here
    for lock in list(_alive):
        with contextlib.suppress(OSError):
            lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_after_fork)
