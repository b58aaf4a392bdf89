"""Directories that are made with their parents, durably, and files that are open within a block."""

import contextlib
import errno
import os
from collections.abc import Iterator

from .posix import UNSUPPORTED, Disk


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


@contextlib.contextmanager
def opened(disk: Disk, path: str) -> Iterator[int]:
    """Opens a file for reading within a `with` block."""
    fd = disk.open(path)
    try:
        yield fd
    finally:
        disk.close(fd)
