"""Several operations of a disk in one: reading whole files, making directories with their parents."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from ..errors import UnsafeError
from . import git_lfs
from .posix import UNSUPPORTED, Disk, looked_up_again
from .read_errors import reading

_MAX_FILE_BYTES = 2 << 30
_MAX_SPARSE_BYTES = 16 << 20  # bytes; larger files are not read if they have holes


def make_dirs(disk: Disk, path: str, made: list[str]) -> None:
    """Makes a directory and those above it where they are missing, durably; `made` gets the ones that it made.

    The name of the one that is there already is made durable, too: its maker may have been killed before that.
    """
    parent = os.path.dirname(path)
    if there := disk.stat(path):
        above = disk.stat(parent)
        if above and above.st_dev == there.st_dev:  # or else something is mounted here, and needs no sync
            try:
                disk.sync_dir(parent)
            except OSError as error:  # where names cannot be synced, or not by this user, this user has made none
                if error.errno not in {*UNSUPPORTED, errno.EACCES, errno.EPERM}:
                    raise
        return
    make_dirs(disk, parent, made)
    with contextlib.suppress(FileExistsError):
        disk.make_dir(path)
        made.append(path)
    disk.sync_dir(parent)


def read_file(disk: Disk, path: str) -> bytes:
    """Reads a whole file of text, of at most 2 GiB, which no manifest comes near, and without holes if it is large.

    Raises `CorruptError` for a file that cannot be read any more, and for pointers of git-lfs.
    """
    with reading(path):
        return looked_up_again(lambda: _read_file(disk, path))  # it may also be replaced while it is open


def _read_file(disk: Disk, path: str) -> bytes:
    with opened(disk, path) as fd:
        if disk.size(fd) > _MAX_FILE_BYTES or (disk.size(fd) > _MAX_SPARSE_BYTES and disk.has_holes(fd)):
            raise UnsafeError(f"{path}: {disk.size(fd)} bytes, which cannot be meant to be read at once")
        buffer = bytearray(disk.size(fd))
        data = bytes(memoryview(buffer)[: disk.read(fd, memoryview(buffer), 0)])
        git_lfs.check(path, data)
        return data


def is_file(disk: Disk, path: str) -> bool:
    """Whether there is a file at a path."""
    there = disk.stat(path)
    return there is not None and stat.S_ISREG(there.st_mode)


@contextlib.contextmanager
def opened(disk: Disk, path: str) -> Iterator[int]:
    """Opens a file for reading within a `with` block."""
    fd = disk.open(path)
    try:
        yield fd
    finally:
        disk.close(fd)
