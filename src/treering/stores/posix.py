"""The few operations through which Treering accesses a disk.

All code that reads or writes files goes through a `Disk`, so a test double can record the operations or make them fail.
Only this module makes calls that exist on some platforms, each with a portable fallback.

A user who may write to a directory may replace a name in it by a link at any moment. So Treering changes trees through
open directories: `Opened` is such a directory, and an `Entry` is a name in one. Both are paths too. A test double needs
nothing else, and neither do systems without calls relative to a directory.
"""

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import re
import stat
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from .._threads.forks import free_in_children
from ..errors import CorruptError
from . import owners
from .buffers import PAGE

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# File systems where mapped pages change only if the file is written, and where preallocation is cheap:
# ext4, xfs, btrfs, tmpfs, overlayfs (statfs(2) f_type).
_LOCAL_FS_TYPES = {0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630}
_FUSE_FS_TYPE = 0x65735546
_MEMORY_FS_TYPES = {0x01021994, 0x858458F6}  # tmpfs, ramfs
_ABSENT_ERRNOS = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, getattr(errno, "ESTALE", 0)}
UNSUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
_NOT_A_FILE_ERRNOS = {errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.ELOOP}
_POPULATE_READ = 22  # MADV_POPULATE_READ
_PROBE_BYTES = 256 << 10  # bytes per read when only readability matters; they stay in the processor's cache
_NO_RESERVE = 0x4000  # MAP_NORESERVE allows a private mapping larger than memory; few of its pages are written

_AT_FDCWD, _NO_REPLACE, _EXCHANGE = -100, 1, 2  # of renameat2(2)

_LOOKUP_ATTEMPTS = 5  # to look up a name while another host replaces its file
_FOLDER_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW"))
_PATH_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC if hasattr(os, "O_PATH") else None  # Linux
_QUICK_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC if hasattr(os, "O_PATH") else 0
_OPEN_FILES = "/proc/self/fd"
_OTHERS_WRITE_BITS = stat.S_IWGRP | stat.S_IWOTH
MAX_LINKS = 40  # on the way to a directory, the limit of Linux
# Threads share a file's position. Used only without positioned reads and writes.
_position_lock = free_in_children(threading.Lock())

T = TypeVar("T")

# True if the system has calls relative to a directory; Windows has none.
HAS_DIR_FD = (
    {os.open, os.stat, os.unlink, os.rmdir, os.mkdir, os.rename, os.link, os.symlink, os.readlink} <= os.supports_dir_fd
    and os.listdir in os.supports_fd
    and hasattr(os, "O_NOFOLLOW")
)


class Entry(str):
    """A path whose last name is looked up in an open directory, even if the path above it was replaced since.

    A link of that name is not followed. An entry is usable until the directory is closed.
    """

    dir_fd: int | None

    def __new__(cls, path: str, dir_fd: int | None) -> "Entry":
        entry = super().__new__(cls, path)
        entry.dir_fd = dir_fd
        return entry

    def sibling(self, name: str) -> "Entry":
        """Returns another entry of the same directory."""
        return Opened(os.path.dirname(self), self.dir_fd).entry(name)


class Opened(str):
    """The path of an open file or directory, and its descriptor. `fd` is None where directories cannot be opened."""

    fd: int | None

    def __new__(cls, path: str, fd: int | None) -> "Opened":
        opened = super().__new__(cls, path)
        opened.fd = fd
        return opened

    def entry(self, name: str) -> Entry:
        """Returns the entry of a name in this directory. Raises `ValueError` for a path."""
        if os.path.basename(name) != name:
            raise ValueError(f"expected a name, found the path {name!r}")
        return Entry(os.path.join(self, name), self.fd)


def _dir_relative(path: str) -> tuple[str, int | None]:
    """Returns the name to look up, and the descriptor of the directory to look in."""
    if HAS_DIR_FD and isinstance(path, Entry) and path.dir_fd is not None:
        return os.path.basename(path), path.dir_fd
    return path, None


def _change(path: str, call: Callable[[str, int | None], T], *others: str) -> T:
    """Calls a system call with the name that it changes, and the descriptor of its directory; see `open_trusted`.

    A `PermissionError` names the owner and what helps. `others`: other paths that the call needs.
    """
    opened: int | None = None
    try:
        if isinstance(path, Entry) and path.dir_fd is not None:
            return call(os.path.basename(path), path.dir_fd)
        if not HAS_DIR_FD:
            return call(path, None)
        folder, name = os.path.split(path)
        opened = open_trusted(folder)
        return call(name, opened)
    except PermissionError as error:
        owners.explain(error, *others, path)
        raise
    finally:
        if opened is not None:
            os.close(opened)


def _change_both(old: str, new: str, call: Callable[[str, int | None, str, int | None], T]) -> T:
    """Does the same for two names. Opens a directory that both have once."""
    is_same = not isinstance(old, Entry) and os.path.dirname(old) == os.path.dirname(new)

    def change_new(to: str, there: int | None) -> T:
        if is_same and there is not None:
            return call(os.path.basename(old), there, to, there)
        return _change(old, lambda name, dir_fd: call(name, dir_fd, to, there))

    return _change(new, change_new, old)


def _fd_or_path(path: str) -> str | int:
    """Returns the descriptor of an open file or directory, or else its path."""
    return path.fd if HAS_DIR_FD and isinstance(path, Opened) and path.fd is not None else path


def lstat(path: str) -> os.stat_result | None:
    """Returns the `lstat` of a path, of a link itself; None if nothing exists at the path."""
    name, dir_fd = _dir_relative(path)
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_link(path: Entry) -> tuple[os.stat_result, str] | None:
    """Returns the `lstat` of a link, and the path that this link leads to; None if it is no link."""
    name, dir_fd = _dir_relative(path)
    if _PATH_FLAGS is None or dir_fd is None:
        found = lstat(path)
        return (found, os.readlink(name, dir_fd=dir_fd)) if found and stat.S_ISLNK(found.st_mode) else None
    try:
        fd = os.open(name, _PATH_FLAGS, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(fd)
        return (found, os.readlink("", dir_fd=fd)) if stat.S_ISLNK(found.st_mode) else None
    finally:
        os.close(fd)


def open_trusted(path: str) -> int | None:
    """Opens a directory to change names in it; None where there are no calls relative to a directory.

    Raises `PermissionError` for a link on the way that another user may have made; see `is_trusted`.
    """
    if not HAS_DIR_FD:
        return None
    if (flags := _PATH_FLAGS) is None:
        return _open_after_look(path)
    with contextlib.suppress(OSError):  # It is missing, or a link on the way leads nowhere. The walk raises the error.
        found = os.open(path, _QUICK_FLAGS)
        # Where the directory is, the system says after it was opened. So it does not matter what a name was before.
        with contextlib.suppress(OSError):
            if os.readlink(f"{_OPEN_FILES}/{found}") == path:
                return found  # There is no link on the way.
        os.close(found)
    names, links = path.split("/")[::-1], 0
    here = os.open("/", flags)
    try:
        while names:
            if not (name := names.pop()):
                continue
            inner = os.open(name, flags, dir_fd=here)
            if not stat.S_ISLNK((found := os.fstat(inner)).st_mode):
                here, outer = inner, here
                os.close(outer)
                continue
            try:
                if (links := links + 1) > MAX_LINKS or not is_trusted(found, os.fstat(here), last=not any(names)):
                    raise _stranger_error(found, name)
                names += os.readlink("", dir_fd=inner).split("/")[::-1]
            finally:
                os.close(inner)
            if not names[-1]:  # the link's target is an absolute path
                here, outer = os.open("/", flags), here
                os.close(outer)
    except OSError as error:
        os.close(here)
        error.filename = path
        raise
    return here


def _open_after_look(path: str) -> int:
    """Does the same where links cannot be opened: looks at each link of the path first."""
    names = path.split("/")
    for n in range(2, len(names) + 1):
        link = lstat(place := "/".join(names[:n]))
        is_link = link is not None and stat.S_ISLNK(link.st_mode)
        if link and is_link and not is_trusted(link, os.stat(os.path.dirname(place)), last=n == len(names)):
            raise _stranger_error(link, names[n - 1], path)
    return os.open(os.path.realpath(path), _FOLDER_FLAGS)


def _stranger_error(link: os.stat_result, name: str, path: str | None = None) -> PermissionError:
    what = f"user {link.st_uid} has made the link {name} on the way; pass the path that it leads to"
    return PermissionError(errno.EACCES, what, path)


def is_trusted(link: os.stat_result, folder: os.stat_result, *, last: bool = False) -> bool:
    """Returns True if no stranger can have made a link: a trusted user owns it, or not every user may write next to it.

    This user and root are trusted, and the owner of the directory unless the link is the `last` name of the path. Linux
    does the same in directories such as ``/tmp`` if protected_symlinks is on. A group that shares a directory trusts
    its members: a link to a bigger disk is often a colleague's.
    """
    if not hasattr(os, "geteuid") or not folder.st_mode & stat.S_IWOTH:
        return True
    return link.st_uid in (os.geteuid(), 0) or (not last and link.st_uid == folder.st_uid)


def is_owned_by_another(found: os.stat_result, folder: str) -> bool:
    """Returns True if another user may have made what was found in a directory.

    That is so if this user does not own it, and the directory's mode lets its group or all users write to it.
    """
    if not hasattr(os, "geteuid") or found.st_uid == os.geteuid():
        return False
    return bool(os.stat(_fd_or_path(folder)).st_mode & _OTHERS_WRITE_BITS)


def is_dir(path: str) -> bool:
    """Returns True if a path is a directory, and not a link to one."""
    found = lstat(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def _can_populate() -> bool:
    """Returns True if a mapping can be populated.

    Linux can since 5.14, but up to 6.8 it never returns from a bad sector.
    """
    found = re.match(r"(\d+)\.(\d+)", os.uname().release) if sys.platform == "linux" else None
    return found is not None and (int(found[1]), int(found[2])) >= (6, 9)


_CAN_POPULATE = _can_populate()


class Disk:
    """The local file system. Paths are absolute text. Errors are the `OSError`s of the system."""

    # Directories and names

    def stat(self, path: str) -> os.stat_result | None:
        """Returns the `stat` of a path, or None if nothing exists at the path."""
        for _ in range(_LOOKUP_ATTEMPTS):
            try:
                return os.stat(path)
            except OSError as error:
                if error.errno not in _ABSENT_ERRNOS:
                    raise
                if error.errno != errno.ESTALE:
                    break
        return None

    def list(self, path: str) -> list[str]:
        """Returns the names in a directory, sorted; none if it does not exist."""
        try:
            return sorted(retry_stale(lambda: os.listdir(_fd_or_path(path))))
        except OSError as error:
            if error.errno not in _ABSENT_ERRNOS:
                raise
            return []

    def make_dir(self, path: str) -> None:
        _change(path, lambda name, dir_fd: os.mkdir(name, dir_fd=dir_fd))

    def remove_dir(self, path: str) -> None:
        _change(path, lambda name, dir_fd: os.rmdir(name, dir_fd=dir_fd))

    def hard_link(self, old: str, new: str) -> bool:
        """Gives a file or link a second name.

        Raises `FileExistsError` if it is taken; returns False without hard links.
        """
        return _hard_link(old, new)

    def copy_link(self, old: str, new: str) -> None:
        """Makes a symbolic link with the target of another. Raises `FileExistsError` if the name is taken."""
        name, dir_fd = _dir_relative(old)
        _change(new, lambda to, there: os.symlink(os.readlink(name, dir_fd=dir_fd), to, dir_fd=there), old)

    def set_mode(self, path: str, mode: int) -> None:
        os.chmod(_fd_or_path(path), mode)

    def set_group(self, path: str, group: int) -> None:
        """Sets the group of a file or directory. Raises `PermissionError` unless this user is in the group."""
        if hasattr(os, "chown"):
            os.chown(_fd_or_path(path), -1, group)

    def link(self, old: str, new: str) -> None:
        """Gives a file a second name.

        Raises `FileExistsError` if it is taken, which makes this call a create-only commit.
        """
        if _hard_link(old, new):
            return
        # Without hard links, two writers can both succeed at the same moment. The file of the second one stays.
        if lstat(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        self.rename(old, new)

    def rename(self, old: str, new: str) -> None:
        """Renames a file. It replaces another file in one step."""
        _change_both(old, new, lambda a, at, b, to: os.replace(a, b, src_dir_fd=at, dst_dir_fd=to))

    def rename_new(self, old: str, new: str) -> None:
        """Moves a directory or file to a free name. Raises `FileExistsError` if the name is taken."""
        if not _renameat2(old, new, _NO_REPLACE):
            if lstat(new):  # If another writer makes it right after this look, only an empty directory can be lost.
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
            _change_both(old, new, lambda a, at, b, to: os.rename(a, b, src_dir_fd=at, dst_dir_fd=to))

    def exchange(self, a: str, b: str) -> bool:
        """Exchanges two names in one step; returns False where the system cannot."""
        return _renameat2(a, b, _EXCHANGE)

    def unlink(self, path: str) -> None:
        _change(path, lambda name, dir_fd: os.unlink(name, dir_fd=dir_fd))

    def sync_dir(self, path: str) -> None:
        """Makes the names in a directory durable."""
        if sys.platform == "win32":
            return
        opened = path.fd if isinstance(path, Opened) else None
        fd = os.open(path, os.O_RDONLY) if opened is None else opened
        try:
            os.fsync(fd)
        finally:
            if opened is None:
                os.close(fd)

    # Writing

    def create(self, path: str) -> int:
        """Creates a file, open for direct writing where the file system can. Raises `FileExistsError`.

        On FUSE, direct writing is not used: the file system's program opens a file of its own for it, and no call from
        here can end that if writes are refused.
        """
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        mode = 0o666  # Read-only comes when it is complete: file servers may apply the mode to open files too.
        if (direct := getattr(os, "O_DIRECT", 0)) and _filesystem_type(os.path.dirname(path)) != _FUSE_FS_TYPE:
            try:
                return _change(path, lambda name, dir_fd: os.open(name, flags | direct, mode, dir_fd=dir_fd))
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                with contextlib.suppress(FileNotFoundError):  # some kernels create the file before they refuse the flag
                    _change(path, lambda name, dir_fd: os.unlink(name, dir_fd=dir_fd))
        return _change(path, lambda name, dir_fd: os.open(name, flags, mode, dir_fd=dir_fd))

    def make_read_only(self, fd: int) -> None:
        """Marks an open file as read-only, where the file system can store that."""
        with contextlib.suppress(OSError, AttributeError):
            os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & ~0o222)

    def open_shared(self, path: str) -> int:
        """Opens a small file that outlives its writers, for reading and writing. Creates it if it is missing.

        The umask decides which users may write it, as with its directory: a colleague may continue after a killed job.
        A link is not followed, because its target could be any file and must not be overwritten.
        """
        flags = os.O_CREAT | os.O_RDWR | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_BINARY", "O_NOFOLLOW"))
        return _change(path, lambda name, dir_fd: os.open(name, flags, 0o666, dir_fd=dir_fd))

    def lock(self, fd: int) -> bool | None:
        """Takes the file's advisory lock without waiting: False if another process holds it, None without locks.

        Closing the file releases the lock.
        """
        return _lock(fd, shared=False)

    def lock_shared(self, fd: int) -> bool | None:
        """Takes a lock as `lock` does, which several processes may hold at once, but not together with `lock`.

        Over NFS, a file that is open for reading gets no other lock.
        """
        return _lock(fd, shared=True)

    def same_file(self, fd: int, path: str) -> bool:
        """Returns True if the path is a name of this open file."""
        found = lstat(path) if isinstance(path, Entry) else self.stat(path)
        return found is not None and os.path.samestat(found, os.fstat(fd))

    def preallocate(self, fd: int, size: int) -> None:
        """Reserves the blocks, so that a full disk raises before anything is written."""
        if size and self.is_local(fd) and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """Writes all of an aligned buffer."""
        while len(data):
            try:
                written = os.pwrite(fd, data, offset) if hasattr(os, "pwrite") else self._write_next(fd, data, offset)
            except OSError as error:
                if error.errno not in UNSUPPORTED or not hasattr(os, "pwrite"):
                    raise
                self._end_direct_io(fd)  # Another thread may have done the same; doing it twice is harmless.
                written = os.pwrite(fd, data, offset)
            if written % PAGE and written < len(data):  # direct I/O must continue at a page boundary
                written -= written % PAGE
                if not written:
                    raise OSError(errno.EIO, "the file system writes less than a page at a time")
            data, offset = data[written:], offset + written

    def _write_next(self, fd: int, data: memoryview, offset: int) -> int:
        with _position_lock:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.write(fd, data)

    def _end_direct_io(self, fd: int) -> None:
        """Ends direct writing.

        Some file systems accept it when a file is opened and refuse it when a file is written.
        """
        if fcntl is not None:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~getattr(os, "O_DIRECT", 0))

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Calls fsync.

        A failure is final: the kernel forgets data that it could not write, so a second call would lie.
        """
        if sys.platform == "darwin" and fcntl is not None:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # fsync stops at the drive's own cache there
        else:
            os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    # Reading

    def open(self, path: str) -> int:
        """Opens a file for reading. Raises `CorruptError` for anything else, because opening a pipe would wait forever.

        Over NFS a name may lead to a file that another host has removed or replaced. Then the name is looked up again.
        """
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        if isinstance(path, Entry):
            flags |= getattr(os, "O_NOFOLLOW", 0)
        name, dir_fd = _dir_relative(path)
        flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
        try:
            fd = retry_stale(lambda: os.open(name, flags, dir_fd=dir_fd))
        except OSError as error:
            if error.errno not in _NOT_A_FILE_ERRNOS:
                raise
        else:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return fd
            os.close(fd)
        raise CorruptError(f"{path}: expected a file, found a folder, a pipe, a device or a loop of links")

    def open_dir(self, path: str) -> int:
        """Opens a directory, to lock it or to work in it. Raises `NotADirectoryError` for a link to one."""
        name, dir_fd = _dir_relative(path)
        try:
            return os.open(name, _FOLDER_FLAGS, dir_fd=dir_fd)
        except OSError as error:
            if error.errno != errno.ELOOP:  # some systems say this for a link, others ENOTDIR
                raise
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def version(self, fd: int) -> tuple[int, int]:
        """Returns values that change when a program writes into the file: its size, and the time of the last write."""
        found = os.fstat(fd)
        return found.st_size, found.st_mtime_ns

    def has_holes(self, fd: int) -> bool:
        """Returns True if parts of a file were never written and read as zeros; False where that cannot be known."""
        try:
            return os.lseek(fd, 0, os.SEEK_HOLE) < self.size(fd)
        except (AttributeError, OSError):
            return False

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Reads into the buffer until it is full or the file ends. Returns the number of bytes."""
        done = 0
        while done < len(buffer):
            count = self._read_some(fd, buffer[done:], offset + done)
            if count == 0:
                break
            done += count
        return done

    def _read_some(self, fd: int, buffer: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(fd, [buffer], offset)
        with _position_lock:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(buffer))
            buffer[: len(data)] = data
            return len(data)

    def map(self, fd: int, size: int) -> mmap.mmap:
        """Maps the file, writable and private: data written to the memory never reaches the file."""
        if sys.platform == "linux":
            flags = mmap.MAP_PRIVATE | _NO_RESERVE
            # Before Python 3.13 each mapping keeps its own descriptor, which it does not need.
            track: Any = {"trackfd": False} if sys.version_info >= (3, 13) else {}
            return mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE, **track)
        return mmap.mmap(fd, size, access=mmap.ACCESS_COPY)

    def populate(self, fd: int, mapped: mmap.mmap, offset: int, size: int) -> bool:
        """Reads a range of a mapped file into memory. Returns False if the file ends earlier.

        Raises the disk's errors here: on access to the pages they would be a signal.
        """
        if _CAN_POPULATE:
            begin = offset - offset % mmap.PAGESIZE
            with contextlib.suppress(AttributeError, OSError):  # after an error, the read below raises the exact one
                mapped.madvise(_POPULATE_READ, begin, offset + size - begin)
                return True
        buffer = memoryview(bytearray(min(size, _PROBE_BYTES)))
        for begin in range(offset, offset + size, _PROBE_BYTES):
            piece = buffer[: offset + size - begin]
            if Disk.read(self, fd, piece, begin) < len(piece):
                return False
        return True

    def is_local(self, fd: int) -> bool:
        """Returns True if the file is on a local file system that is known to be safe for mapping."""
        return _filesystem_type(fd) in _LOCAL_FS_TYPES


def is_in_memory(path: str) -> bool:
    """Returns True if a path is on a file system in memory; False where that is not known."""
    return _filesystem_type(path) in _MEMORY_FS_TYPES


def _filesystem_type(place: int | str) -> int | None:
    """Returns the type number of the file system that holds a file or path; None where Linux does not say."""
    if sys.platform != "linux":
        return None
    buffer = ctypes.create_string_buffer(256)
    failed = _libc().fstatfs(place, buffer) if isinstance(place, int) else _libc().statfs(os.fsencode(place), buffer)
    return None if failed else int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) & 0xFFFFFFFF


def retry_stale(find: Callable[[], T]) -> T:
    """Returns the result of looking up a name.

    Raises `FileNotFoundError` if another host removes it again and again.
    """
    path: Any = None
    for _ in range(_LOOKUP_ATTEMPTS):
        try:
            return find()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            path = error.filename
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _lock(fd: int, *, shared: bool) -> bool | None:
    if fcntl is None:
        return None
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES) else None
    return True


def _hard_link(old: str, new: str) -> bool:
    follow = os.link not in os.supports_follow_symlinks
    name, dir_fd = _dir_relative(old)  # It does not change.
    try:
        _change(
            new,
            lambda to, at: os.link(name, to, src_dir_fd=dir_fd, dst_dir_fd=at, follow_symlinks=follow),
            old,
        )
    except OSError as error:
        # EIO is an error of the disk, or how some mounts refuse links. The link may exist after such an answer.
        if error.errno == errno.EIO and (found := lstat(old)):
            made = lstat(new)
            return made is not None and os.path.samestat(found, made)
        if error.errno not in {*UNSUPPORTED, errno.EPERM, errno.EMLINK, errno.EXDEV}:
            raise
        return False
    return True


def _renameat2(old: str, new: str, flags: int) -> bool:
    """Calls renameat2(2) of Linux 3.15. Returns False without that call, or if this file system does not support it."""
    call = getattr(_libc(), "renameat2", None) if sys.platform == "linux" else None
    if call is None:
        return False

    def rename(name: str, dir_fd: int | None, to: str, there: int | None) -> bool:
        dir_fd, there = _AT_FDCWD if dir_fd is None else dir_fd, _AT_FDCWD if there is None else there
        if call(dir_fd, os.fsencode(name), there, os.fsencode(to), flags) == 0:
            return True
        if (number := ctypes.get_errno()) in UNSUPPORTED:
            return False
        raise OSError(number, os.strerror(number), new)

    return _change_both(old, new, rename)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
