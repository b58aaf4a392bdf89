"""Files and directories of other formats, which appear under their name as a whole or not at all.

They are written beside their path under a temporary name, ``.name.7f3a9c.tmp``, synced, and put in place in one
step. An old one is never removed before the new one is durable. A temporary file or directory is locked while its
writer lives; the next writer removes the leftovers of killed ones, when its own file or directory is durable.

The directory may be one that others write to, such as ``/tmp``, and replace a name by a link at any moment: names are
looked up in the open directory, and no link is followed.
"""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable, Collection, Iterator

from ..errors import CorruptError, ExistsError, SaveError
from .directories import close_folder, folder, make_dirs, open_folder
from .file_sink import FileSink
from .kept_files import Beside, Owned, Replaced, survey
from .nfs import warn_of_anothers
from .posix import Disk, Entry, Opened, is_anothers, is_dir, is_trusted, look
from .sequential import SequentialWriter
from .temporary_names import place_of, temporary_beside
from .trees import remove_tree, sync_tree

_CREATE_ATTEMPTS = 50  # at making a file or directory, while others tidy up
_log = logging.getLogger("treering")


@contextlib.contextmanager
def new_file(disk: Disk, path: str, *, overwrite: bool) -> Iterator[SequentialWriter]:
    """Yields a file to write within a `with` block; at its end it is in place, after an error it never was.

    A file that replaces another has its mode and group. Where the path is a link, its target is replaced. Raises
    `ExistsError` for a link that another user may have put there.
    """
    if overwrite:
        path = _target(path)
    with _parents(disk, path) as parent:
        place = parent.entry(os.path.basename(path))
        sink = _new_file(disk, place)
        file, temporary = SequentialWriter(sink), parent.entry(os.path.basename(sink.path))
        try:
            if overwrite and (there := look(place)):  # before anything is in it that others may not read
                # Not what else a mode can say: another user may have made the old file one that runs as its owner.
                _keep_access(disk, sink.opened, there, there.st_mode & 0o777)
            yield file
            file.sync()
            if overwrite:
                disk.rename(temporary, place)
            else:
                _publish(path, lambda: disk.link(temporary, place))
        finally:
            with contextlib.suppress(OSError):
                disk.unlink(temporary)
            file.discard()
        try:
            disk.sync_dir(parent)
        except BaseException as error:
            if overwrite and isinstance(error, OSError):
                raise SaveError(
                    f"{path}: the new one is in place, but the disk failed to make that durable ({error}); "
                    "after a power cut it may be the old one again"
                ) from error
            if not overwrite:
                with contextlib.suppress(OSError):
                    disk.unlink(place)
                    disk.sync_dir(parent)
            raise
        _clean(disk, place, parent)


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
    for other directories, which may be anything, for other files whose `names` the new one needs or that must not lie
    `beside` it, and for a link that another user may have put there.
    """
    if os.path.isdir(path):
        path = _target(path)
    survey(disk, path, owned, names, beside)
    with _parents(disk, path) as parent:
        place = parent.entry(os.path.basename(path))
        new = _new_directory(disk, place)
        temporary = parent.entry(os.path.basename(new))
        settled = True  # the directory with the temporary name would not be in place after a power cut
        old: Replaced | None = None
        try:
            if there := look(place):
                _keep_access(disk, new, there, stat.S_IMODE(there.st_mode) | stat.S_IRWXU)
            yield str(temporary)
            sync_tree(disk, new)  # this takes time, so the files to keep are listed after it
            if overwrite and look(place) is not None:
                kept = survey(disk, path, owned, names, beside)
                _put_in_place_of(disk, new, temporary, place, kept)
                old = kept
            else:
                _publish(path, lambda: disk.rename_new(temporary, place))
            settled = False
            try:
                disk.sync_dir(parent)
            except BaseException:
                with contextlib.suppress(OSError):
                    _change_places(disk, temporary, place) if old else disk.rename_new(place, temporary)
                    disk.sync_dir(parent)
                    settled, old = True, None
                raise
            settled = True
        finally:
            if settled and old:
                old.clear(disk, temporary, Opened(place, new.fd))
            elif settled:
                remove_tree(disk, temporary, new)
            close_folder(disk, new)
        _clean(disk, place, parent)


@contextlib.contextmanager
def scratch_directory(disk: Disk, path: str) -> Iterator[str]:
    """Yields a directory beside a path, removed after the `with` block, or by the next writer if this one is killed."""
    with _parents(disk, path) as parent:
        place = parent.entry(os.path.basename(path))
        _clean(disk, place, parent)
        new = _new_directory(disk, place)
        try:
            yield str(new)
        finally:
            remove_tree(disk, parent.entry(os.path.basename(new)), new)
            close_folder(disk, new)


def _target(path: str) -> str:
    """The path that a link leads to. Raises `ExistsError` for one that another user may have put there."""
    link = look(path)
    if link is None or not stat.S_ISLNK(link.st_mode):
        return path
    if not is_trusted(link, os.stat(os.path.dirname(path))):
        raise ExistsError(
            f"{path}: expected a checkpoint to replace, found a link of user {link.st_uid} in a directory of others; "
            "write to another path, or remove the link"
        )
    return os.path.realpath(path)


def _put_in_place_of(disk: Disk, new: Opened, temporary: Entry, place: Entry, replaced: Replaced) -> None:
    """Gives the new directory the files that are kept, then exchanges it with the old one."""
    with folder(disk, place) as old:
        changed = replaced.carry_over(disk, old, new)
    if there := look(place):
        changed = _keep_access(disk, new, there, stat.S_IMODE(there.st_mode)) or changed
    if changed:
        disk.sync_dir(new)
    _change_places(disk, temporary, place)


def _keep_access(disk: Disk, new: Opened, old: os.stat_result, mode: int) -> bool:
    """Gives a new file or directory the group of the old one and a mode. Returns False if it has both.

    If this user may not give it to that group, another group gets no access.
    """
    own = os.stat(new) if new.fd is None else os.fstat(new.fd)
    if own.st_gid != old.st_gid:
        try:
            disk.set_group(new, old.st_gid)
        except OSError as error:  # not permitted, or a group that is unknown here, as in containers
            _log.warning("%s: it cannot be given to group %d (%s); groups have no access", new, old.st_gid, error)
            mode &= ~stat.S_IRWXG
    if stat.S_IMODE(own.st_mode) == mode and own.st_gid == old.st_gid:
        return False
    disk.set_mode(new, mode)
    return True


def _new_file(disk: Disk, place: Entry) -> FileSink:
    """A locked file under a temporary name."""
    for _ in range(_CREATE_ATTEMPTS):
        sink = FileSink(disk, place.sibling(os.path.basename(temporary_beside(place))))
        if sink.protect():
            return sink
        sink.close()
    raise FileNotFoundError(errno.ENOENT, "removed again and again before it was written", str(place))


def _new_directory(disk: Disk, place: Entry) -> Opened:
    """A directory under a temporary name, open and locked."""
    for _ in range(_CREATE_ATTEMPTS):
        temporary = place.sibling(os.path.basename(temporary_beside(place)))
        disk.make_dir(temporary)
        try:
            new = open_folder(disk, temporary)
        except FileNotFoundError:
            continue
        except BaseException:
            disk.remove_dir(temporary)
            raise
        if new.fd is None or (disk.lock(new.fd) is not False and disk.same_file(new.fd, temporary)):
            return new
        close_folder(disk, new)
    raise FileNotFoundError(errno.ENOENT, "removed again and again before it was written", str(place))


def _clean(disk: Disk, place: Entry, parent: Opened) -> None:
    """Removes what killed writers have left beside a path. Called when the contents of the path are durable.

    A leftover may be all that there was of the checkpoint, where two directories are not exchanged in one step.
    """
    try:
        for left in (one for one in disk.list(parent) if place_of(one) == os.path.basename(place)):
            try:
                remove_unlocked(disk, parent.entry(left), parent)
            except (FileNotFoundError, CorruptError):  # another writer has removed it, or put something else there
                pass
            except OSError as error:
                _log.warning("%s: removing %s, which a killed writer has left, failed: %s", place, left, error)
    except OSError as error:
        _log.warning("%s: tidying up failed: %s", place, error)


def remove_unlocked(disk: Disk, path: Entry, parent: Opened) -> None:
    """Removes a file or directory unless its writer lives, or that cannot be known. A link is none of ours.

    Nor is what another user may have put there, which is logged: it may be no leftover at all.
    """
    found = look(path)
    if found is None or not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        return
    if is_anothers(found, parent):
        warn_of_anothers(path, found.st_uid)
        return
    left = open_folder(disk, path) if stat.S_ISDIR(found.st_mode) else Opened(path, disk.open(path))
    try:
        # It may have been replaced since it was looked at.
        if left.fd is None or not os.path.samestat(found, os.fstat(left.fd)):
            return
        locked = (disk.lock if stat.S_ISDIR(found.st_mode) else disk.lock_shared)(left.fd)
        if locked is True and disk.same_file(left.fd, path):
            _remove(disk, path, left)
    finally:
        close_folder(disk, left)


def _remove(disk: Disk, path: str, opened: Opened | None = None) -> None:
    if is_dir(path):
        remove_tree(disk, path, opened)
    else:
        disk.unlink(path)


def _publish(path: str, put: Callable[[], None]) -> None:
    try:
        put()
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR):
            raise
        raise ExistsError(f"{path}: another writer put something there first; it is untouched") from None


def _change_places(disk: Disk, new: Entry, old: Entry) -> None:
    if disk.exchange(new, old):
        return
    aside = old.sibling(os.path.basename(temporary_beside(old)))
    disk.rename(old, aside)
    try:
        disk.rename(new, old)
    except OSError:
        disk.rename(aside, old)
        raise
    disk.rename(aside, new)


@contextlib.contextmanager
def _parents(disk: Disk, path: str) -> Iterator[Opened]:
    """Makes the parents of a path that are missing, and removes them after an error; yields the last one, open."""
    made: list[str] = []
    try:
        parent = os.path.dirname(path)
        make_dirs(disk, parent, made)
        with folder(disk, os.path.realpath(parent)) as opened:
            yield Opened(parent, opened.fd)
    except BaseException:
        with contextlib.suppress(OSError):
            for directory in reversed(made):
                disk.remove_dir(directory)
        raise
