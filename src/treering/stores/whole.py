"""Files and directories of other formats, which appear under their name as a whole or not at all.

They are written beside their place under a temporary name, ``.name.7f3a9c.tmp``, synced, and put in place in one
step. An old one is never removed before the new one is durable. What has a temporary name is locked while its writer
lives; what killed writers have left is removed by the next one, when its own is durable.
"""

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Collection, Iterator

from .._paths import few
from ..errors import ExistsError, SaveError
from .buffers import aligned, round_up
from .disk import Disk, make_dirs, opened

_BUFFER = 4 << 20
_TRIES = 50  # at making a file or directory, while others tidy up
Owned = Callable[[Disk, str], Collection[str]]  # which names in a directory belong to a checkpoint of some format
_log = logging.getLogger("treering")


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

    def sync(self) -> None:
        """Makes the file durable; nothing can be written any more."""
        self._flush()
        self._disk.truncate(self._fd, self.size)
        self._disk.sync(self._fd)

    def close(self) -> None:
        """Makes the file durable and lets go of it."""
        self.sync()
        self.discard()

    def lock(self) -> bool:
        """Keeps others from removing the file before it is let go; False when they have begun to."""
        return _lock(self._disk, self._fd, self.path)

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
    with _parents(disk, path):
        file = _new_file(disk, path)
        try:
            yield file
            file.sync()
            if overwrite:
                disk.rename(file.path, path)
            else:
                _publish(path, lambda: disk.link(file.path, path))
        finally:
            with contextlib.suppress(OSError):
                disk.unlink(file.path)
            file.discard()
        try:
            disk.sync_dir(os.path.dirname(path))
        except BaseException as error:
            if overwrite and isinstance(error, OSError):
                raise SaveError(
                    f"{path}: the new one is in place, but the disk failed to make that durable ({error}); "
                    "after a power cut it may be the old one again"
                ) from error
            if not overwrite:
                with contextlib.suppress(OSError):
                    disk.unlink(path)
                    disk.sync_dir(os.path.dirname(path))
            raise
    _clean(disk, path)


@contextlib.contextmanager
def new_directory(disk: Disk, path: str, *, overwrite: bool, owned: Owned) -> Iterator[str]:
    """A directory to be filled within a `with` block; at its end it is in place, after an error it never was.

    Its files may be written by anybody; they are synced at the end. An old directory changes places with the new
    one in one step where the system can, else in two, between which a crash leaves it beside its place.

    owned: which names in the old one are part of what is to be replaced. Other files are kept. Raises `ExistsError` for
    other directories, which may be anything.
    """
    check_free(disk, path, overwrite=overwrite, directory=True)
    _others(disk, path, owned)
    parent = os.path.dirname(path)
    with _parents(disk, path):
        temporary, fd = _new_directory(disk, path)
        settled = True  # what has the temporary name would not be in place after a power cut
        try:
            yield temporary
            replaces = overwrite and disk.stat(path) is not None
            for name in _others(disk, path, owned):
                _keep(disk, os.path.join(path, name), os.path.join(temporary, name))
            _sync_tree(disk, temporary)
            if replaces:
                _change_places(disk, temporary, path)
            else:
                _publish(path, lambda: disk.rename_new(temporary, path))
            settled = False
            try:
                disk.sync_dir(parent)
            except BaseException:
                with contextlib.suppress(OSError):
                    _change_places(disk, temporary, path) if replaces else disk.rename_new(path, temporary)
                    disk.sync_dir(parent)
                    settled = True
                raise
            settled = True
        finally:
            if settled:
                remove_tree(disk, temporary)  # by now the old one, if all went well
            if fd is not None:
                disk.close(fd)
    _clean(disk, path)


def _others(disk: Disk, path: str, owned: Owned) -> list[str]:
    """The names of the files in a directory that are not part of what is replaced. Raises `ExistsError`."""
    ours = owned(disk, path)
    others = [name for name in disk.list(path) if name not in ours]
    if folders := [name for name in others if _is_dir(disk, os.path.join(path, name))]:
        raise ExistsError(
            f"{path}: expected a checkpoint to replace, found folders in it that are no part of it: "
            f"{few(tuple(folders))}; write to another path, or move them out of it"
        )
    return others


def _keep(disk: Disk, old: str, new: str) -> None:
    """Gives a file a second name, or makes a copy of it where there are no such. Raises `ExistsError`."""
    try:
        if disk.hard_link(old, new):
            return
        file = Appended(disk, new)
    except FileExistsError:
        raise ExistsError(
            f"{old}: expected a part of the checkpoint that is replaced, found a file that is none and whose name the "
            "new one needs; write to another path, or move the file"
        ) from None
    try:
        with opened(disk, old) as fd:
            buffer = memoryview(bytearray(_BUFFER))
            while count := disk.read(fd, buffer, file.size):
                file.write(buffer[:count])
        file.close()
    finally:
        file.discard()


def _new_file(disk: Disk, path: str) -> Appended:
    """A locked file under a temporary name."""
    for _ in range(_TRIES):
        file = Appended(disk, _temporary(path))
        if file.lock():
            return file
        file.discard()
    raise FileNotFoundError(errno.ENOENT, "removed again and again before it was written", path)


def _new_directory(disk: Disk, path: str) -> tuple[str, int | None]:
    """A directory under a temporary name, and what holds its lock."""
    for _ in range(_TRIES):
        temporary = _temporary(path)
        disk.make_dir(temporary)
        try:
            fd = disk.open_dir(temporary)
        except FileNotFoundError:
            continue
        except PermissionError:  # Windows opens no directories
            return temporary, None
        except BaseException:
            disk.remove_dir(temporary)
            raise
        if _lock(disk, fd, temporary):
            return temporary, fd
        disk.close(fd)
    raise FileNotFoundError(errno.ENOENT, "removed again and again before it was written", path)


def _lock(disk: Disk, fd: int, path: str) -> bool:
    """Locks what is open, where there are locks; False when somebody who tidies up was faster."""
    return disk.lock(fd) is not False and disk.same_file(fd, path)


def _clean(disk: Disk, path: str) -> None:
    """Removes what killed writers have left beside a path; to be called when what lies there is durable.

    It may be all that there was of the checkpoint, where two directories do not change places in one step.
    """
    directory, name = os.path.split(path)
    ours = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{6}}\.tmp")
    try:
        for left in filter(ours.fullmatch, disk.list(directory)):
            left_over = os.path.join(directory, left)
            with contextlib.suppress(FileNotFoundError):
                _remove_unlocked(disk, left_over)
    except OSError as error:
        _log.warning("%s: tidying up failed: %s", path, error)


def _remove_unlocked(disk: Disk, path: str) -> None:
    """Removes a file or directory unless its writer lives, or nobody can tell."""
    fd = disk.open_dir(path) if _is_dir(disk, path) else disk.open(path)
    try:
        if disk.lock(fd) is True:
            _remove(disk, path)
    finally:
        disk.close(fd)


def _remove(disk: Disk, path: str) -> None:
    if _is_dir(disk, path):
        remove_tree(disk, path)
    else:
        disk.unlink(path)


def _is_dir(disk: Disk, path: str) -> bool:
    found = disk.stat(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def _publish(path: str, put: Callable[[], None]) -> None:
    try:
        put()
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR):
            raise
        raise ExistsError(f"{path}: another writer put something there first; it is untouched") from None


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
    made: list[str] = []
    try:
        make_dirs(disk, os.path.dirname(path), made)
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for directory in reversed(made):
                disk.remove_dir(directory)
        raise
