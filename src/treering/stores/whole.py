"""Files and directories of other formats, which appear under their name as a whole or not at all.

They are written beside their place under a temporary name, ``.name.7f3a9c.tmp``, synced, and put in place in one
step. An old one is never removed before the new one is durable.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator

from ..errors import ExistsError
from .buffers import aligned, round_up
from .disk import Disk

_BUFFER = 4 << 20


def check_free(disk: Disk, path: str, *, overwrite: bool, directory: bool) -> None:
    """Raises `ExistsError` when writing a file or directory to a path would touch something it must not."""
    found = disk.stat(path)
    if found is not None:
        what = "directory" if stat.S_ISDIR(found.st_mode) else "file"
        if what != ("directory" if directory else "file"):
            raise ExistsError(f"{path}: expected a free path, found a {what}; choose another path or remove it")
        if not overwrite:
            raise ExistsError(f"{path}: expected a free path, found a {what}; pass overwrite=True to replace it")


class Appended:
    """A file that is written from one end to the other."""

    def __init__(self, disk: Disk, path: str):
        self.path, self.size = path, 0
        self._disk = disk
        self._fd = disk.create(path, 0o644)
        self._buffer = aligned(_BUFFER)
        self._filled = self._flushed = 0

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        data = memoryview(data).cast("B")
        self.size += len(data)
        while len(data):
            count = min(len(data), _BUFFER - self._filled)
            self._buffer[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == _BUFFER:
                self._flush()

    def close(self) -> None:
        """Makes the file durable."""
        self._flush()
        self._disk.truncate(self._fd, self.size)
        self._disk.sync(self._fd)
        self.discard()

    def discard(self) -> None:
        """Lets go of the file as it is."""
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def _flush(self) -> None:
        if self._filled:
            self._disk.write(self._fd, self._buffer[: round_up(self._filled)], self._flushed)
            self._flushed += self._filled
            self._filled = 0


@contextlib.contextmanager
def new_file(disk: Disk, path: str, *, overwrite: bool) -> Iterator[Appended]:
    """A file to be written within a `with` block; at its end it is in place, after an error it never was."""
    check_free(disk, path, overwrite=overwrite, directory=False)
    _make_dirs(disk, os.path.dirname(path))
    temporary = _temporary(path)
    file = Appended(disk, temporary)
    try:
        yield file
        file.close()
        if overwrite:
            disk.rename(temporary, path)
        else:
            try:
                disk.link(temporary, path)
            except FileExistsError:
                raise ExistsError(f"{path}: another writer put a file there first; it is untouched") from None
            disk.unlink(temporary)
        disk.sync_dir(os.path.dirname(path))
    except BaseException:
        file.discard()
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
        raise


@contextlib.contextmanager
def new_directory(disk: Disk, path: str, *, overwrite: bool) -> Iterator[str]:
    """A directory to be filled within a `with` block; at its end it is in place, after an error it never was.

    Its files may be written by anybody; they are synced at the end.
    """
    check_free(disk, path, overwrite=overwrite, directory=True)
    _make_dirs(disk, os.path.dirname(path))
    temporary = _temporary(path)
    disk.make_dir(temporary)
    try:
        yield temporary
        _sync_tree(disk, temporary)
        old = None
        if overwrite and disk.stat(path):
            old = _temporary(path)
            disk.rename(path, old)
        try:
            disk.rename(temporary, path)
        except OSError:
            if old:
                disk.rename(old, path)
            raise
        disk.sync_dir(os.path.dirname(path))
    except BaseException:
        remove_tree(disk, temporary)
        raise
    if old:
        remove_tree(disk, old)


def remove_tree(disk: Disk, path: str) -> None:
    """Removes a directory and everything in it; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        for name in disk.list(path):
            inner = os.path.join(path, name)
            found = os.lstat(inner)
            if stat.S_ISDIR(found.st_mode):
                remove_tree(disk, inner)
            else:
                disk.unlink(inner)
        disk.remove_dir(path)


def _sync_tree(disk: Disk, path: str) -> None:
    for name in disk.list(path):
        inner = os.path.join(path, name)
        found = disk.stat(inner)
        if found and stat.S_ISDIR(found.st_mode):
            _sync_tree(disk, inner)
        elif found:
            fd = disk.open(inner)
            try:
                disk.sync(fd)
            finally:
                disk.close(fd)
    disk.sync_dir(path)


def _temporary(path: str) -> str:
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.{secrets.token_hex(3)}.tmp")


def _make_dirs(disk: Disk, path: str) -> None:
    parent = os.path.dirname(path)
    if disk.stat(path) is None:
        _make_dirs(disk, parent)
        with contextlib.suppress(FileExistsError):
            disk.make_dir(path)
        disk.sync_dir(parent)
