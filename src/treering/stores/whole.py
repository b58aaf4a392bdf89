"""Files and directories of other formats, which appear under their name as a whole or not at all.

They are written beside their place under a temporary name, ``.name.7f3a9c.tmp``, synced, and put in place in one
step. An old one is never removed before the new one is durable.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator

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
    temporary = _temporary(path)
    with _parents(disk, path):
        file = None
        try:
            file = Appended(disk, temporary)
            yield file
            file.close()
            if overwrite:
                disk.rename(temporary, path)
            else:
                _publish(disk, path, lambda: disk.link(temporary, path))
        except BaseException:
            if file:
                file.discard()
            raise
        finally:
            with contextlib.suppress(OSError):
                disk.unlink(temporary)
        _make_durable(disk, path, None if overwrite else disk.unlink)


@contextlib.contextmanager
def new_directory(disk: Disk, path: str, *, overwrite: bool) -> Iterator[str]:
    """A directory to be filled within a `with` block; at its end it is in place, after an error it never was.

    Its files may be written by anybody; they are synced at the end. An old directory changes places with the new
    one in one step where the system can, else in two, between which a crash leaves it beside its place.
    """
    check_free(disk, path, overwrite=overwrite, directory=True)
    temporary = _temporary(path)
    with _parents(disk, path):
        try:
            disk.make_dir(temporary)
            yield temporary
            _sync_tree(disk, temporary)
            if overwrite and disk.stat(path):
                _change_places(disk, temporary, path)
            else:
                _publish(disk, path, lambda: disk.rename_new(temporary, path))
        finally:
            remove_tree(disk, temporary)  # by now the old one, if all went well
        _make_durable(disk, path, None if overwrite else lambda made: remove_tree(disk, made))


def _publish(disk: Disk, path: str, put: Callable[[], None]) -> None:
    try:
        put()
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR):
            raise
        raise ExistsError(f"{path}: another writer put something there first; it is untouched") from None


def _make_durable(disk: Disk, path: str, take_back: Callable[[str], None] | None) -> None:
    try:
        disk.sync_dir(os.path.dirname(path))
    except BaseException:
        if take_back:
            with contextlib.suppress(OSError):
                take_back(path)
        raise


def _change_places(disk: Disk, new: str, old: str) -> None:
    if disk.exchange(new, old):
        return
    aside = _temporary(old)
    disk.rename(old, aside)
    try:
        disk.rename(new, old)
    except OSError:
        disk.rename(aside, old)
        raise
    disk.rename(aside, new)


def remove_tree(disk: Disk, path: str) -> None:
    """Removes a directory and everything in it; what cannot be removed stays."""
    for name in disk.list(path):
        inner = os.path.join(path, name)
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(os.lstat(inner).st_mode):
                remove_tree(disk, inner)
            else:
                disk.unlink(inner)
    with contextlib.suppress(OSError):
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


@contextlib.contextmanager
def _parents(disk: Disk, path: str) -> Iterator[None]:
    """Makes the parents of a path that are missing, and takes them away again after an error."""
    missing: list[str] = []
    parent = os.path.dirname(path)
    while disk.stat(parent) is None:
        missing.append(parent)
        parent = os.path.dirname(parent)
    made: list[str] = []
    try:
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                disk.make_dir(directory)
                made.append(directory)
            disk.sync_dir(os.path.dirname(directory))
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for directory in reversed(made):
                disk.remove_dir(directory)
        raise
