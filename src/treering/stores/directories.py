"""Opens directories for a `with` block, and makes them durably together with their parents."""

import contextlib
import errno
import os
from collections.abc import Iterator

from . import posix
from .posix import UNSUPPORTED, Disk, Opened


def make_dirs(disk: Disk, path: str, made: list[str]) -> None:
    """Makes a directory and its missing parents, durably. Appends those that it made to `made`.

    The name of the lowest existing directory is made durable too: its maker may have been killed before that.
    """
    parent = os.path.dirname(path)
    if there := disk.stat(path):
        above = disk.stat(parent)
        if above and above.st_dev == there.st_dev:  # else it is a mount point, which needs no sync
            try:
                disk.sync_dir(parent)
            except OSError as error:  # Where this user may not sync names, this user did not make them either.
                if error.errno not in {*UNSUPPORTED, errno.EACCES, errno.EPERM}:
                    raise
        return
    make_dirs(disk, parent, made)
    with contextlib.suppress(FileExistsError):
        disk.make_dir(path)
        if path not in made:  # Else another process has removed it since.
            made.append(path)
    disk.sync_dir(parent)


@contextlib.contextmanager
def opened(disk: Disk, path: str) -> Iterator[int]:
    """Opens a file for reading within a `with` block."""
    fd = disk.open(path)
    try:
        yield fd
    finally:
        disk.close(fd)


def open_folder(disk: Disk, path: str) -> Opened:
    """Opens a directory. Raises `NotADirectoryError` for a link to a directory."""
    try:
        return Opened(path, disk.open_dir(path))
    except PermissionError:
        if posix.HAS_DIR_FD or not posix.is_dir(path):
            raise
        return Opened(path, None)  # Windows cannot open directories


def close_folder(disk: Disk, opened: Opened) -> None:
    if opened.fd is not None:
        disk.close(opened.fd)


@contextlib.contextmanager
def folder(disk: Disk, path: str) -> Iterator[Opened]:
    """Opens a directory within a `with` block. Raises `NotADirectoryError` for a link to a directory."""
    found = open_folder(disk, path)
    try:
        yield found
    finally:
        close_folder(disk, found)


@contextlib.contextmanager
def trusted_folder(path: str) -> Iterator[Opened]:
    """Opens a directory within a `with` block, to remove or rename entries.

    Raises the errors of `posix.open_trusted`.
    """
    fd = posix.open_trusted(path)
    try:
        yield Opened(path, fd)
    finally:
        if fd is not None:
            os.close(fd)
