"""Walks, syncs and removes directory trees, while other users may replace any part of them by a link.

Each directory is opened from its parent and never through a link. Its names are changed through the open directory.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator

from .directories import close_folder, folder, open_folder
from .directories import opened as open_file
from .posix import Disk, Opened, lstat


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


def sync_tree(disk: Disk, opened: Opened) -> None:
    """Makes a directory and everything in it durable."""

    def on_error(error: OSError) -> None:
        raise error

    for inside, names in walk(disk, opened, on_error):
        for name, found in names.items():
            if stat.S_ISREG(found.st_mode):
                with open_file(disk, inside.entry(name)) as fd:
                    disk.sync(fd)
        disk.sync_dir(inside)
