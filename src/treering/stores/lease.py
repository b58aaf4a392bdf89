"""Admits one writer at a time to a run, by a locked file that names the process which holds it.

The file of a killed writer stays; only its lock matters.
"""

import contextlib
import datetime
import functools
import logging
import os
import socket
import stat
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgspec

from .._threads.forks import free_in_children
from .._threads.preload_decoders import preload_decoders
from .._threads.thread import if_free
from ..errors import CorruptError, ExistsError, SaveError, UnsupportedError
from . import lease_registry, owners, posix
from .directories import make_dirs, trusted_folder
from .file_io import create_in_folder
from .posix import Disk
from .store import LOCK_NAME

_VERSION = 1
_MAX_VERSION_1_BYTES = 4096  # bytes; every file of this version has fewer
_MAX_READ_BYTES = 1 << 20  # bytes; a file of a later version may be larger
_log = logging.getLogger("treering")
F = TypeVar("F", bound="Callable[[WriterLock], None]")
_acquire_lock = free_in_children(threading.RLock())  # held while any lock of this process is acquired or released


class _HeldLock(NamedTuple):
    fd: int
    path: str
    made: list[str]  # directories that were made for it
    file: tuple[int, int]  # the device and the number of the file, which no other file has while this one is open


class _Entry(NamedTuple):
    """The entry of a `WriterLock` in `_registry`, with the file that it holds.

    It outlives the object: a file of a dropped object stays locked until a thread can release it.
    """

    owner: "weakref.ref[WriterLock]"
    disk: Disk
    held: list[_HeldLock]


_registry: dict[int, _Entry] = {}  # by the identity of `held`


class _Envelope(msgspec.Struct):
    version: Any = _VERSION
    requires: Any = ()


preload_decoders(_Envelope)


def _exclusively(method: F) -> F:
    """Decorates a method that holds `_acquire_lock`, and then releases what was dropped meanwhile.

    A context manager written in Python could be interrupted while it has the lock, outside its block. The traceback of
    the interrupt would then keep the lock.
    """

    @functools.wraps(method)
    def call(lock: "WriterLock") -> None:
        try:
            with _acquire_lock:
                method(lock)
        finally:
            _release_dropped()

    return call  # type: ignore[return-value]


class WriterLock:
    """The lease of a run: a lock on a file, which the system releases when the process ends, for whatever reason.

    Within a process a new `WriterLock` acquires the lease from an older one of the same run: a failed notebook cell has
    not closed its Checkpointer, and the next cell must be able to continue. But an older one whose `busy` returns True
    keeps the lease. One that has lost it can never acquire it again.
    """

    def __init__(self, disk: Disk, run: str, busy: Callable[[], bool] = lambda: False):
        self._disk, self._run, self._busy = disk, run, busy
        self.lost = False  # another WriterLock of this process has acquired the run
        # Has one element while the file is locked. It is a list, because the finalizer empties it.
        self._held: list[_HeldLock] = []
        _registry[id(self._held)] = entry = _Entry(weakref.ref(self), disk, self._held)
        weakref.finalize(self, _on_drop, entry)

    @_exclusively
    def acquire(self) -> None:
        """Acquires the lock unless it is held, and makes the run's directory.

        Raises an `ExistsError` that names the process which holds the lock, `MismatchError` if the lock is lost,
        `UnsupportedError` if a later release made the lock file, and `SaveError` for errors of the system. Where
        files cannot be locked, every process may write.
        """
        if self.lost:
            raise lease_registry.lost_error(self._run)
        if self._held:
            return
        try:
            self._take_from_this_process()
            self._acquire()
        except (ExistsError, UnsupportedError, SaveError):
            raise
        except NotADirectoryError as error:
            raise SaveError(f"{self._run}: expected a directory for the run, found a file there or above it") from error
        except OSError as error:
            raise SaveError(f"{self._run}: the run cannot be prepared for writing: {error}") from error

    @_exclusively
    def check_free(self) -> None:
        """Raises an `ExistsError` that names another process which holds the lock. Acquires nothing."""
        path = os.path.join(self._run, LOCK_NAME)
        # Else a lock that this process is just acquiring would look like that of another process.
        if self._holders(path):
            return
        try:
            fd = self._disk.open(path)
        except (OSError, CorruptError):  # there is no such file, or this user may not read it
            return
        try:
            if self._disk.lock_shared(fd) is False:
                raise self._held_error(fd, path)
        finally:
            self._disk.close(fd)

    def _held_error(self, fd: int, path: str) -> ExistsError:
        more = f". If its host is dead, a server may keep the lock forever (NFSv3 does): then remove {path}"
        return lease_registry.held_error(self._run, _read_holder(self._disk, fd), more)

    def _take_from_this_process(self) -> None:
        """Releases the lock of an idle owner in this process. Raises `ExistsError` if that owner is saving."""
        for other in self._holders(os.path.join(self._run, LOCK_NAME)):
            if other is self:
                continue
            if other._busy():
                raise lease_registry.busy_error(self._run)
            _log.warning("%s: acquired from another Checkpointer of this process, which was not closed", self._run)
            other.lost = True
            other.release()

    def _holders(self, path: str) -> list["WriterLock"]:
        """Returns the locks of this process that hold the file at a path. Looks at that file alone."""
        locks = _existing_locks()  # also if there is no file: this releases what was dropped
        with contextlib.suppress(OSError):
            if found := self._disk.stat(path):
                return [one for one in locks if any(held.file == _identity(found) for held in one._held)]
        return []

    def _acquire(self) -> None:
        path = os.path.join(self._run, LOCK_NAME)
        made: list[str] = []
        try:
            fd = self._open_locked(path, made)
            with contextlib.suppress(OSError):  # on a full disk the file names no process, and the lock still works
                self._disk.truncate(fd, 0)
                self._disk.write(fd, memoryview(_new_writer_record()), 0)
            self._disk.sync(fd)  # so that other hosts see the name
        except BaseException:
            _release(self._disk, self._held)
            _remove_empty_folders(self._disk, made)
            raise

    def _open_locked(self, path: str, made: list[str]) -> int:
        """Opens and locks the file, and returns its descriptor. Appends the directories that it made to `made`."""
        while True:
            fd, is_ours = self._open_file(path, made)
            try:
                locked = self._disk.lock(fd)
                if locked is False:
                    raise self._held_error(fd, path)
                if locked is None and not is_ours:  # Over NFS a lock needs the right to write.
                    raise _unknown_holder_error(path, os.fstat(fd))
                if locked is None:
                    _log.warning(
                        "%s: another job may write this run at the same time, which would harm both: files cannot be "
                        "locked on this file system; mount it with locks (Lustre: -o flock)",
                        self._run,
                    )
                self._held.append(_HeldLock(fd, path, made, _identity(os.fstat(fd))))
                if self._disk.same_file(fd, path):
                    _check_version(self._disk, fd, path)
                    # A file with another hard link may be in a backup of the run, which writing to it would change
                    # too. A file of another user, whose job was killed, cannot be written. A new file takes its name.
                    if is_ours and not (self._disk.size(fd) and os.fstat(fd).st_nlink > 1):
                        return fd
                    try:
                        _unlink(self._disk, fd, path)
                    except PermissionError as error:
                        if is_ours:
                            raise
                        _log.warning("%s: still names a process that has ended: %s", path, error)
                        return fd  # It is locked nevertheless.
            except BaseException as error:
                # A later version of Treering wrote this file. Forget it, because `_release` would delete it.
                if isinstance(error, UnsupportedError):
                    self._held.clear()
                if not self._held:  # Otherwise the caller releases it.
                    self._disk.close(fd)
                raise
            self._held.pop()  # The path no longer names this file: try again with a new one.
            self._disk.close(fd)

    def _open_file(self, path: str, made: list[str]) -> tuple[int, bool]:
        """Opens the file, and makes it if it is missing. Returns False if this user may only read it.

        Raises `SaveError` for a file of another user that this user may not read, and for a link or a directory.
        """
        try:
            make_folder = functools.partial(make_dirs, self._disk, self._run, made)
            return create_in_folder(make_folder, lambda: self._disk.open_shared(path)), True
        except OSError as error:
            if (found := posix.lstat(path)) is None:
                raise
            if not stat.S_ISREG(found.st_mode):
                what = "link" if stat.S_ISLNK(found.st_mode) else "directory or other special file"
                raise SaveError(
                    f"{path}: expected the file that names the writer of the run, found a {what} that is owned by "
                    f"{owners.name_of(found.st_uid)}; remove it"
                ) from None
            if not isinstance(error, PermissionError):
                raise
        try:
            with trusted_folder(self._run) as folder:
                return self._disk.open(folder.entry(LOCK_NAME)), False
        except PermissionError:
            raise _unknown_holder_error(path, found) from None

    @_exclusively
    def release(self) -> None:
        """Releases the lock."""
        # Else another thread could find the file locked and no owner in this process.
        _release(self._disk, self._held)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _existing_locks() -> list[WriterLock]:
    """Returns the locks of this process, and releases what dropped ones hold. The caller has `_acquire_lock`."""
    # List before releasing. In the other order, one that is dropped in between would be neither listed nor released.
    found = [one for entry in list(_registry.values()) if (one := entry.owner()) is not None]
    _release_dropped()
    return found


def _release_dropped() -> None:
    """Releases what dropped locks hold, unless another thread has `_acquire_lock`. That thread then does it."""
    while dropped := [entry for entry in list(_registry.values()) if entry.owner() is None]:
        if not _release_unless_busy(dropped):
            return


def _on_drop(entry: _Entry) -> None:
    """Releases what a dropped lock holds, and at the end of the process what any lock holds."""
    _release_unless_busy([entry])
    _release_dropped()


def _release_unless_busy(entries: list[_Entry]) -> bool:
    """Releases what the entries hold. Returns False, and does nothing, while another thread has `_acquire_lock`.

    The garbage collector may call this in any thread, even in one that the holder of `_acquire_lock` waits for. So it
    must not wait for that lock.
    """

    def release() -> bool:
        for entry in entries:
            _release(entry.disk, entry.held)
            _registry.pop(id(entry.held), None)
        return True

    return if_free(_acquire_lock, release)


def _release(disk: Disk, held: list[_HeldLock]) -> None:
    """Releases what is held and removes the lock's file, and the directories that were made for nothing."""
    while True:
        try:  # Two threads may release it: the one that pops it does.
            fd, path, made, _ = held.pop()  # before the close, else a second call could close a reused number
        except IndexError:
            return
        with contextlib.suppress(OSError):
            _unlink(disk, fd, path)
        with contextlib.suppress(OSError):
            disk.close(fd)
        _remove_empty_folders(disk, made)


def _unlink(disk: Disk, fd: int, path: str) -> None:
    """Removes the name of an open lock file, unless the run was removed and made again with another one."""
    with trusted_folder(os.path.dirname(path)) as folder:
        entry = folder.entry(LOCK_NAME)
        if disk.same_file(fd, entry):
            disk.unlink(entry)


def _remove_empty_folders(disk: Disk, made: list[str]) -> None:
    """Removes the directories that were made for a run if nothing was saved in it. Directories with contents stay."""
    with contextlib.suppress(OSError):
        for directory in reversed(made):
            disk.remove_dir(directory)


def _unknown_holder_error(path: str, found: os.stat_result) -> SaveError:
    """Returns the error for a lock file of another user that this user cannot lock."""
    return SaveError(
        f"{path}: owned by {owners.name_of(found.st_uid)}, mode {stat.S_IMODE(found.st_mode):o}, and this user can "
        "neither write nor lock it, so it is unknown whether a job of theirs writes this run; if none does, remove "
        f"it: rm {path} (jobs of a group that shares a run need umask 002)"
    )


def _new_writer_record() -> bytes:
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"version": _VERSION, "host": socket.gethostname(), "process": os.getpid(), "since": since}
    return msgspec.json.encode(about)


def _check_version(disk: Disk, fd: int, path: str) -> None:
    """Raises `UnsupportedError` if a later release wrote the file: the meaning of its lock is unknown to this one."""
    data = _read_lock_file(disk, fd)
    try:
        found = msgspec.json.decode(data, type=_Envelope)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        if len(data) < _MAX_VERSION_1_BYTES:  # empty, or incomplete because its writer was killed
            return
        what = f"{disk.size(fd)} bytes that cannot be decoded"
    else:
        if type(found.version) is int and found.version == _VERSION and not found.requires:
            return
        requires = f" that requires {found.requires!r:.100}" if found.requires else ""
        what = f"version {found.version!r:.100}{requires}"
    raise UnsupportedError(
        f"{path}: expected version {_VERSION} of this file, found {what}; a later release "
        "of treering writes this run: upgrade treering, or make sure that no job writes it and remove the file"
    )


def _read_lock_file(disk: Disk, fd: int) -> bytes:
    buffer = bytearray(min(disk.size(fd), _MAX_READ_BYTES))
    return bytes(buffer[: disk.read(fd, memoryview(buffer), 0)])


def _read_holder(disk: Disk, fd: int) -> str:
    try:
        holder = msgspec.json.decode(_read_lock_file(disk, fd), type=dict[str, str | int])
        return f"process {holder['process']} on {holder['host']}, since {holder['since']},"
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, KeyError):  # it was just acquired or released
        return "another process"


def _close_after_fork() -> None:
    """Closes the locks in a forked child.

    The child shares them, so it would hold them after the death of its parent.
    """
    for entry in list(_registry.values()):
        while entry.held:
            with contextlib.suppress(OSError):
                entry.disk.close(entry.held.pop().fd)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_after_fork)
