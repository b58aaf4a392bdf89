"""Directories with all that is in them, while others may replace any of it by a link.

Each directory is opened in the one above it, never through a link, and what is done to its names is done in the open
one.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator

from .directories import close_folder, folder, open_folder
from .directories import opened as open_file
from .posix import Disk, Opened, look


class _Level:
    """A directory that is gone through: what its names are, and those of the directories that are still to come."""

    def __init__(self, disk: Disk, opened: Opened):
        self.path = str(opened)
        self._own = None if opened.fd is None else os.fstat(opened.fd)
        self.names = {name: found for name in disk.list(opened) if (found := look(opened.entry(name)))}
        self.inner = [name for name, found in reversed(self.names.items()) if stat.S_ISDIR(found.st_mode)]

    def above(self, disk: Disk, below: Opened) -> Opened:
        """Opens it again from the one below. Raises `OSError` when somebody has moved that one elsewhere."""
        if self._own is None:
            return open_folder(disk, self.path)
        found = Opened(self.path, disk.open_dir(below.entry("..")))
        if found.fd is not None and not os.path.samestat(os.fstat(found.fd), self._own):
            close_folder(disk, found)
            raise OSError(errno.ESTALE, "moved while it was gone through", str(below))
        return found


def walk(
    disk: Disk, top: Opened, failed: Callable[[OSError], None]
) -> Iterator[tuple[Opened, dict[str, os.stat_result]]]:
    """Goes through a directory and those in it, the innermost first: each, open, and the `lstat` of its names.

    `failed` gets the errors of directories that are left out. However deep it goes, three are open at a time at most.
    """
    here, levels = top, [_Level(disk, top)]
    try:
        while levels:
            if levels[-1].inner:
                below = None
                try:
                    below = open_folder(disk, here.entry(levels[-1].inner.pop()))
                    levels.append(_Level(disk, below))
                    here, below = below, here
                except OSError as error:
                    failed(error)
                finally:
                    if below and below is not top:
                        close_folder(disk, below)
                continue
            yield here, levels.pop().names
            if levels:
                above = top if len(levels) == 1 else levels[-1].above(disk, here)
                here, below = above, here
                close_folder(disk, below)
    except OSError as error:
        failed(error)
    finally:
        if here is not top:
            close_folder(disk, here)


def remove_tree(disk: Disk, path: str, opened: Opened | None = None) -> None:
    """Removes a directory and everything in it; what cannot be removed stays. Links are removed, and not followed.

    opened: the directory, where it is open already. Nothing is removed when another one is at the path by now.
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

    def failed(error: OSError) -> None:
        raise error

    for inside, names in walk(disk, opened, failed):
        for name, found in names.items():
            if stat.S_ISREG(found.st_mode):
                with open_file(disk, inside.entry(name)) as fd:
                    disk.sync(fd)
        disk.sync_dir(inside)
