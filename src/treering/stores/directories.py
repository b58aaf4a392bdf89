"""Opens, makes, walks, syncs and removes directories, while other users may replace any part of them by a link.

A tree is walked from its open root: each directory is opened from its parent and never through a link, and its names
are changed through the open directory.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator

from . import posix
from .posix import UNSUPPORTED, Disk, Opened, lstat


class _Level:
    """A directory on the way down: its names, and the subdirectories that are still to visit."""

    def __init__(self, disk: Disk, opened: Opened):
        self.path = str(opened)
        self._stat = None if opened.fd is None else os.fstat(opened.fd)
        self.names = {name: found for name in disk.list(opened) if (found := lstat(opened.entry(name)))}
        self.subfolders = [name for name, found in reversed(self.names.items()) if stat.S_ISDIR(found.st_mode)]

    def open_parent(self, disk: Disk, below: Opened) -> Opened:
        """Opens this directory again from the one below. Raises `OSError` if another process has moved the latter."""
        if self._stat is None:
            return open_folder(disk, self.path)
        found = Opened(self.path, disk.open_dir(below.entry("..")))
        if found.fd is not None and not os.path.samestat(os.fstat(found.fd), self._stat):
            close_folder(disk, found)
            raise OSError(errno.ESTALE, "moved while it was read", str(below))
        return found


def walk(
    disk: Disk, top: Opened, on_error: Callable[[OSError], None]
) -> Iterator[tuple[Opened, dict[str, os.stat_result]]]:
    """Yields each directory of a tree, innermost first: the open directory and the `lstat` of its names.

    At most three directories are open at a time, at any depth.

    on_error: gets the error of each directory that is skipped.
    """
    here, levels = top, [_Level(disk, top)]
    try:
        while levels:
            if levels[-1].subfolders:
                below = None
                try:
                    below = open_folder(disk, here.entry(levels[-1].subfolders.pop()))
                    levels.append(_Level(disk, below))
                    here, below = below, here
                except OSError as error:
                    on_error(error)
                finally:
                    if below and below is not top:
                        close_folder(disk, below)
                continue
            yield here, levels.pop().names
            if levels:
                above = top if len(levels) == 1 else levels[-1].open_parent(disk, here)
                here, below = above, here
                close_folder(disk, below)
    except OSError as error:
        on_error(error)
    finally:
        if here is not top:
            close_folder(disk, here)


def remove_tree(disk: Disk, path: str, opened: Opened | None = None) -> None:
    """Removes a directory and everything in it, except what cannot be removed. Removes links without following them.

    opened: the directory, if it is open already. If another directory is at the path by now, nothing is removed.
    """
    if opened and opened.fd is not None and not disk.same_file(opened.fd, path):
        return
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        for inside, names in walk(disk, opened or stack.enter_context(folder(disk, path)), lambda error: None):
            for name, found in names.items():
                with contextlib.suppress(OSError):
                    (disk.remove_dir if stat.S_ISDIR(found.st_mode) else disk.unlink)(inside.entry(name))
        disk.remove_dir(path)


def sync_tree(disk: Disk, tree: Opened) -> None:
    """Makes a directory and everything in it durable."""

    def on_error(error: OSError) -> None:
        raise error

    for inside, names in walk(disk, tree, on_error):
        for name, found in names.items():
            if stat.S_ISREG(found.st_mode):
                with opened(disk, inside.entry(name)) as fd:
                    disk.sync(fd)
        disk.sync_dir(inside)


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
