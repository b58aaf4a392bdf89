"""Files and directories of other formats, which appear under their name as a whole or not at all.

They are written beside their path under a temporary name, ``.name.7f3a9c.tmp``, synced, and put in place in one
step. An old one is never removed before the new one is durable. A temporary file or directory is locked while its
writer lives; the next writer removes the leftovers of killed ones, when its own file or directory is durable.
"""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable, Collection, Iterator

from ..errors import ExistsError, SaveError
from .directories import make_dirs
from .file_sink import FileSink
from .kept_files import Beside, Owned, Replaced, is_dir, look, survey
from .posix import Disk
from .sequential import SequentialWriter
from .temporary_names import place_of, temporary_beside

_CREATE_ATTEMPTS = 50  # at making a file or directory, while others tidy up
_log = logging.getLogger("treering")


@contextlib.contextmanager
def new_file(disk: Disk, path: str, *, overwrite: bool) -> Iterator[SequentialWriter]:
    """Yields a file to write within a `with` block; at its end it is in place, after an error it never was.

    A file that replaces another has its mode and group. Where the path is a link, its target is replaced.
    """
    if overwrite and os.path.islink(path):
        path = os.path.realpath(path)
    with _parents(disk, path):
        file = _new_file(disk, path)
        try:
            if overwrite and (there := look(path)):  # before anything is in it that others may not read
                _keep_access(disk, file.path, there, stat.S_IMODE(there.st_mode))
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
def new_directory(
    disk: Disk,
    path: str,
    *,
    overwrite: bool,
    owned: Owned,
    names: Collection[str] = (),
    beside: Beside | None = None,
) -> Iterator[str]:
    """Yields a directory to fill within a `with` block; at its end it is in place, after an error it never was.

    Any code may write its files; they are synced at the end. An old directory is exchanged with the new one in one step
    where the system can, else in two, between which a crash leaves it beside its path. Where the path is a link to a
    directory, that directory is replaced, and the link stays.

    owned: the files in the old directory that are part of what is replaced. Other files are kept. Raises `ExistsError`
    for other directories, which may be anything, and for other files whose `names` the new one needs or that must not
    lie `beside` it.
    """
    if os.path.islink(path) and os.path.isdir(path):
        path = os.path.realpath(path)
    survey(disk, path, owned, names, beside)
    parent = os.path.dirname(path)
    with _parents(disk, path):
        temporary, fd = _new_directory(disk, path)
        settled = True  # the directory with the temporary name would not be in place after a power cut
        old: Replaced | None = None
        try:
            if there := look(path):
                _keep_access(disk, temporary, there, stat.S_IMODE(there.st_mode) | stat.S_IRWXU)
            yield temporary
            _sync_tree(disk, temporary)  # this takes time, so the files to keep are listed after it
            if overwrite and look(path) is not None:
                kept = survey(disk, path, owned, names, beside)
                _put_in_place_of(disk, temporary, path, kept)
                old = kept
            else:
                _publish(path, lambda: disk.rename_new(temporary, path))
            settled = False
            try:
                disk.sync_dir(parent)
            except BaseException:
                with contextlib.suppress(OSError):
                    _change_places(disk, temporary, path) if old else disk.rename_new(path, temporary)
                    disk.sync_dir(parent)
                    settled, old = True, None
                raise
            settled = True
        finally:
            if settled:
                old.clear(disk, temporary, path) if old else remove_tree(disk, temporary)
            if fd is not None:
                disk.close(fd)
    _clean(disk, path)


@contextlib.contextmanager
def scratch_directory(disk: Disk, path: str) -> Iterator[str]:
    """Yields a directory beside a path, removed after the `with` block, or by the next writer if this one is killed."""
    with _parents(disk, path):
        _clean(disk, path)
        temporary, fd = _new_directory(disk, path)
        try:
            yield temporary
        finally:
            remove_tree(disk, temporary)
            if fd is not None:
                disk.close(fd)


def _put_in_place_of(disk: Disk, new: str, old: str, replaced: Replaced) -> None:
    """Gives the new directory the files that are kept, then exchanges it with the old one."""
    changed = replaced.carry_over(disk, old, new)
    if there := look(old):
        changed = _keep_access(disk, new, there, stat.S_IMODE(there.st_mode)) or changed
    if changed:
        disk.sync_dir(new)
    _change_places(disk, new, old)


def _keep_access(disk: Disk, path: str, old: os.stat_result, mode: int) -> bool:
    """Gives a new file or directory the group of the old one and a mode. Returns False if it has both.

    If this user may not give it to that group, another group gets no access.
    """
    new = os.lstat(path)
    if new.st_gid != old.st_gid:
        try:
            disk.set_group(path, old.st_gid)
        except OSError as error:  # not permitted, or a group that is unknown here, as in containers
            _log.warning("%s: it cannot be given to group %d (%s); groups have no access", path, old.st_gid, error)
            mode &= ~stat.S_IRWXG
    if stat.S_IMODE(new.st_mode) == mode and new.st_gid == old.st_gid:
        return False
    disk.set_mode(path, mode)
    return True


def _new_file(disk: Disk, path: str) -> SequentialWriter:
    """A locked file under a temporary name."""
    for _ in range(_CREATE_ATTEMPTS):
        file = SequentialWriter(FileSink(disk, temporary_beside(path)))
        if file.sink.protect():
            return file
        file.discard()
    raise FileNotFoundError(errno.ENOENT, "removed again and again before it was written", path)


def _new_directory(disk: Disk, path: str) -> tuple[str, int | None]:
    """A directory under a temporary name, and the descriptor that holds its lock; None where there is none."""
    for _ in range(_CREATE_ATTEMPTS):
        temporary = temporary_beside(path)
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
        if disk.lock(fd) is not False and disk.same_file(fd, temporary):
            return temporary, fd
        disk.close(fd)
    raise FileNotFoundError(errno.ENOENT, "removed again and again before it was written", path)


def _clean(disk: Disk, path: str) -> None:
    """Removes what killed writers have left beside a path. Called when the contents of the path are durable.

    A leftover may be all that there was of the checkpoint, where two directories are not exchanged in one step.
    """
    directory, name = os.path.split(path)
    try:
        for left in (one for one in disk.list(directory) if place_of(one) == name):
            left_over = os.path.join(directory, left)
            with contextlib.suppress(FileNotFoundError):
                remove_unlocked(disk, left_over)
    except OSError as error:
        _log.warning("%s: tidying up failed: %s", path, error)


def remove_unlocked(disk: Disk, path: str) -> None:
    """Removes a file or directory unless its writer lives, or that cannot be known. A link is none of ours."""
    if os.path.islink(path):
        return
    fd = disk.open_dir(path) if is_dir(path) else disk.open(path)
    try:
        if (disk.lock(fd) if is_dir(path) else disk.lock_shared(fd)) is True:
            _remove(disk, path)
    finally:
        disk.close(fd)


def _remove(disk: Disk, path: str) -> None:
    if is_dir(path):
        remove_tree(disk, path)
    else:
        disk.unlink(path)


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
    aside = temporary_beside(old)
    disk.rename(old, aside)
    try:
        disk.rename(new, old)
    except OSError:
        disk.rename(aside, old)
        raise
    disk.rename(aside, new)


def remove_tree(disk: Disk, path: str) -> None:
    """Removes a directory and everything in it; what cannot be removed stays. Links are not followed."""
    for name in disk.list(path) if is_dir(path) else ():
        inner = os.path.join(path, name)
        with contextlib.suppress(OSError):
            if is_dir(inner):
                remove_tree(disk, inner)
            else:
                disk.unlink(inner)
    with contextlib.suppress(OSError):
        disk.remove_dir(path)


def _sync_tree(disk: Disk, path: str) -> None:
    for name in disk.list(path):
        inner = os.path.join(path, name)
        if is_dir(inner):
            _sync_tree(disk, inner)
        else:
            fd = disk.open(inner)
            try:
                disk.sync(fd)
            finally:
                disk.close(fd)
    disk.sync_dir(path)


@contextlib.contextmanager
def _parents(disk: Disk, path: str) -> Iterator[None]:
    """Makes the parents of a path that are missing, and removes them again after an error."""
    made: list[str] = []
    try:
        make_dirs(disk, os.path.dirname(path), made)
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for directory in reversed(made):
                disk.remove_dir(directory)
        raise
