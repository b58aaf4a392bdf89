"""Writes files and directories of other formats so that each appears complete under its name, or not at all.

A new file or directory is written next to its path under a temporary name such as ``.name.7f3a9c.tmp``. It is synced,
and then put in place in one step. The old one is removed only when the new one is durable. A writer locks its temporary
file or directory while it lives. The next writer removes what killed writers left, once its own data is durable.

Other users may write to the parent directory, as in ``/tmp``, and may replace a name by a link at any moment. So names
are looked up in the open directory, and links are not followed.
"""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable, Collection, Iterator

from ..errors import CorruptError, ExistsError, SaveError
from .directories import close_folder, folder, make_dirs, open_folder, remove_tree, sync_tree, trusted_folder
from .file_sink import FileSink
from .nfs import warn_foreign_owner, warn_no_locks
from .posix import MAX_LINKS, Disk, Entry, Opened, is_dir, is_owned_by_another, is_trusted, lstat, read_link
from .preserved_files import CheckOthers, OldFolder, Owned, inspect_old
from .sequential import SequentialWriter
from .temporary_names import final_name, temporary_sibling

_CREATE_ATTEMPTS = 50  # to make a file or directory while other processes remove temporary names
_log = logging.getLogger("treering")


@contextlib.contextmanager
def new_file(disk: Disk, path: str, *, overwrite: bool) -> Iterator[SequentialWriter]:
    """Yields a file to write within a `with` block. It is in place at the end; after an error, it never was.

    A file that replaces another gets that file's mode and group. If the path is a link, its target is replaced. Raises
    `ExistsError` for a link that another user may have made.
    """
    if overwrite and os.path.islink(path):
        path = _link_target(path)
    with _parents(disk, path) as parent:
        place = parent.entry(os.path.basename(path))
        sink = _create_temporary_file(disk, place)
        temporary = parent.entry(os.path.basename(sink.path))
        try:
            file = SequentialWriter(sink)  # its buffer may find no memory, and then no file must stay
            # The mode is set while the file is empty: other users must not read what the old mode hides.
            if overwrite and (old_stat := lstat(place)):
                # Only the permission bits: another user may have set the old file's set-user-id bit.
                _keep_access(disk, sink.opened, old_stat, old_stat.st_mode & 0o777)
            yield file
            file.sync()
            if overwrite:
                disk.rename(temporary, place)
            else:
                _put_exclusively(path, lambda: disk.link(temporary, place))
        finally:
            with contextlib.suppress(OSError):
                disk.unlink(temporary)
            sink.close()
        try:
            disk.sync_dir(parent)
        except BaseException as error:
            if overwrite and isinstance(error, OSError):
                raise SaveError(
                    f"{path}: the new file is in place, but the disk failed to make its name durable ({error}); "
                    "after a power cut the old file may be back"
                ) from error
            if not overwrite:  # The caller gets an error, so the file must not be in place.
                with contextlib.suppress(OSError):
                    disk.unlink(place)
                    disk.sync_dir(parent)
            raise
        _remove_leftovers(disk, place, parent)


@contextlib.contextmanager
def new_directory(
    disk: Disk,
    path: str,
    *,
    overwrite: bool,
    owned: Owned,
    names: Collection[str] = (),
    check_others: CheckOthers | None = None,
) -> Iterator[str]:
    """Yields a directory to fill within a `with` block. It is in place at the end; after an error, it never was.

    Any code may write its files, because they are synced at the end. An old directory is exchanged with the new one in
    one step where the system can. Elsewhere it takes two steps, and a crash between them leaves the old directory next
    to its path. If the path is a link to a directory, that directory is replaced and the link stays.

    owned: returns the files of the old directory that belong to the checkpoint. They are replaced; other files are
        kept.
    names: the names that the new directory needs.
    check_others: raises `ExistsError` for files that must not stay in the directory.

    Raises `ExistsError` for an old directory with folders of other things, for files that have one of `names`, for
    files that `check_others` refuses, and for a link that another user may have made.
    """
    if os.path.isdir(path):
        path = _link_target(path)
    inspect_old(disk, path, owned, names, check_others)
    with _parents(disk, path) as parent:
        place = parent.entry(os.path.basename(path))
        new = _create_temporary_directory(disk, place)
        temporary = parent.entry(os.path.basename(new))
        settled = True  # it is certain which of the two names has which directory, even after a power cut
        old: OldFolder | None = None
        try:
            if old_stat := lstat(place):
                _keep_access(disk, new, old_stat, stat.S_IMODE(old_stat.st_mode) | stat.S_IRWXU)
            yield str(temporary)
            sync_tree(disk, new)  # This takes time, so the files to keep are listed afterwards.
            if overwrite and lstat(place) is not None:
                kept = inspect_old(disk, path, owned, names, check_others)
                _replace_folder(disk, new, temporary, place, kept)
                old = kept
            else:
                _put_exclusively(path, lambda: disk.rename_new(temporary, place))
            settled = False
            try:
                disk.sync_dir(parent)
            except BaseException:
                # The caller gets an error, so the old directory must be back. If that fails too, nothing is removed.
                with contextlib.suppress(OSError):
                    _exchange_names(disk, temporary, place) if old else disk.rename_new(place, temporary)
                    disk.sync_dir(parent)
                    settled, old = True, None
                raise
            settled = True
        finally:
            if settled and old:
                old.remove_old(disk, temporary, Opened(place, new.fd))
            elif settled:
                remove_tree(disk, temporary, new)
            close_folder(disk, new)
        _remove_leftovers(disk, place, parent)


@contextlib.contextmanager
def scratch_directory(disk: Disk, path: str) -> Iterator[str]:
    """Yields a directory next to a path. It is removed after the `with` block, or by the next writer after a kill."""
    with _parents(disk, path) as parent:
        place = parent.entry(os.path.basename(path))
        _remove_leftovers(disk, place, parent)
        new = _create_temporary_directory(disk, place)
        try:
            yield str(new)
        finally:
            remove_tree(disk, parent.entry(os.path.basename(new)), new)
            close_folder(disk, new)


def _link_target(path: str) -> str:
    """Returns the path that a link leads to. Raises `ExistsError` if another user may have made the link."""
    for _ in range(MAX_LINKS):
        with trusted_folder(os.path.dirname(path)) as parent:
            if (found := read_link(parent.entry(os.path.basename(path)))) is None:
                return path
            link, target = found
            if not is_trusted(link, os.stat(parent) if parent.fd is None else os.fstat(parent.fd)):
                raise ExistsError(
                    f"{path}: expected a checkpoint to replace, found a link that user {link.st_uid} owns, in a "
                    "directory that others may write to; write to another path, or remove the link"
                )
        path = os.path.join(os.path.dirname(path), target)
        if os.path.basename(path) in ("", ".", ".."):
            with trusted_folder(path):
                path = os.path.realpath(path)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _replace_folder(disk: Disk, new: Opened, temporary: Entry, place: Entry, replaced: OldFolder) -> None:
    """Gives the new directory the files that are kept, then exchanges it with the old one."""
    with folder(disk, place) as old:
        changed = replaced.preserve_others(disk, old, new)
    if old_stat := lstat(place):
        changed = _keep_access(disk, new, old_stat, stat.S_IMODE(old_stat.st_mode)) or changed
    if changed:
        disk.sync_dir(new)
    _exchange_names(disk, temporary, place)


def _keep_access(disk: Disk, new: Opened, old: os.stat_result, mode: int) -> bool:
    """Gives a new file or directory a mode and the group of the old one. Returns False if it has both already.

    If this user may not assign that group, the file's group gets no access.
    """
    own = os.stat(new) if new.fd is None else os.fstat(new.fd)
    if own.st_gid != old.st_gid:
        try:
            disk.set_group(new, old.st_gid)
        except OSError as error:  # not permitted, or a group that is unknown here, as in containers
            _log.warning("%s: the group cannot be set to %d (%s); its group gets no access", new, old.st_gid, error)
            mode &= ~stat.S_IRWXG
    if stat.S_IMODE(own.st_mode) == mode and own.st_gid == old.st_gid:
        return False
    disk.set_mode(new, mode)
    return True


def _create_temporary_file(disk: Disk, place: Entry) -> FileSink:
    """Creates a file under a temporary name and locks it."""
    for _ in range(_CREATE_ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            return FileSink(disk, place.sibling(os.path.basename(temporary_sibling(place))))
    raise FileNotFoundError(errno.ENOENT, "other processes kept removing it before it was written", str(place))


def _create_temporary_directory(disk: Disk, place: Entry) -> Opened:
    """Creates a directory under a temporary name, opens it and locks it."""
    for _ in range(_CREATE_ATTEMPTS):
        temporary = place.sibling(os.path.basename(temporary_sibling(place)))
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
    raise FileNotFoundError(errno.ENOENT, "other processes kept removing it before it was written", str(place))


def _remove_leftovers(disk: Disk, place: Entry, parent: Opened) -> None:
    """Removes what killed writers left next to a path. Called when the contents of the path are durable.

    Not earlier: where two directories cannot be exchanged in one step, a leftover may be the only copy of the
    checkpoint.
    """
    try:
        for left in (one for one in disk.list(parent) if final_name(one) == os.path.basename(place)):
            try:
                with unused(disk, parent.entry(left), parent) as remove:
                    if remove:
                        remove()
            except (FileNotFoundError, CorruptError):  # another writer has removed or replaced it
                pass
            except OSError as error:
                _log.warning("%s: removing %s, which a killed writer left, failed: %s", place, left, error)
    except OSError as error:
        _log.warning("%s: removing what killed writers left failed: %s", place, error)


@contextlib.contextmanager
def unused(disk: Disk, path: Entry, parent: Opened) -> Iterator[Callable[[], None] | None]:
    """Locks a file or directory within a `with` block, and yields a function that removes it; see `Store.unused`.

    Yields None for links. What another user may have made is left alone too, and logged, because it may not be a
    leftover.
    """
    found = lstat(path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    is_foreign = is_owned_by_another(found, parent)
    if is_foreign:
        warn_foreign_owner(path, found.st_uid)
    if is_foreign or not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        yield None
        return
    left = open_folder(disk, path) if stat.S_ISDIR(found.st_mode) else Opened(path, disk.open(path))
    try:
        # Another process may have replaced it after the `lstat` above.
        free = left.fd is not None and os.path.samestat(found, os.fstat(left.fd)) and _lock(disk, left, found)

        def remove() -> None:
            if left.fd is not None and disk.same_file(left.fd, path):  # else a new file has the name
                _remove(disk, path, left)

        yield remove if free else None
    finally:
        close_folder(disk, left)


def _lock(disk: Disk, opened: Opened, found: os.stat_result) -> bool:
    """Locks an open file or directory. Returns False if its writer lives, or if that cannot be known."""
    assert opened.fd is not None
    free = disk.lock(opened.fd)
    # NFS grants no exclusive lock on a file that is open for reading. Two cleaners may share the other lock.
    if free is None and stat.S_ISREG(found.st_mode):
        free = disk.lock_shared(opened.fd)
    if free is None:
        warn_no_locks(os.path.dirname(opened))
    return free is True


def _remove(disk: Disk, path: str, opened: Opened | None = None) -> None:
    if is_dir(path):
        remove_tree(disk, path, opened)
    else:
        disk.unlink(path)


def _put_exclusively(path: str, put: Callable[[], None]) -> None:
    try:
        put()
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR):
            raise
        raise ExistsError(f"{path}: another writer made it first; it is untouched") from None


def _exchange_names(disk: Disk, new: Entry, old: Entry) -> None:
    """Exchanges two directories, in one step where the system can."""
    if disk.exchange(new, old):
        return
    # After a crash between these renames, the old directory has the temporary name. `_remove_leftovers` runs only once
    # a complete
    # checkpoint is in place, so it is not removed before.
    spare = old.sibling(os.path.basename(temporary_sibling(old)))
    disk.rename(old, spare)
    try:
        disk.rename(new, old)
    except OSError:
        disk.rename(spare, old)
        raise
    disk.rename(spare, new)


@contextlib.contextmanager
def _parents(disk: Disk, path: str) -> Iterator[Opened]:
    """Creates the missing parents of a path and yields the last one, open. After an error it removes what it made."""
    made: list[str] = []
    try:
        parent = os.path.dirname(path)
        make_dirs(disk, parent, made)
        with trusted_folder(parent) as found, folder(disk, found.entry(".")) as opened:
            yield Opened(parent, opened.fd)
    except BaseException:
        with contextlib.suppress(OSError):
            for directory in reversed(made):
                disk.remove_dir(directory)
        raise
