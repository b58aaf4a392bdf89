"""Removing checkpoints, and the leftovers of killed or replaced saves.

A checkpoint of which any part is of a later version of the format is never moved, replaced or deleted.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator

import xxhash

from ..._threads.python_gc import gc_paused
from ...errors import CorruptError, UnsupportedError
from ...stores.nfs import warn_of_no_locks
from ...stores.posix import Disk
from ...stores.read_errors import UnreadableError
from ...stores.whole_files import opened, read_file
from . import files, manifest, metrics
from .manifest import file_names
from .schema import MANIFEST, OWN_FILES

_log = logging.getLogger("treering")


def check_removable(disk: Disk, path: str) -> None:
    """Raises `UnsupportedError` when a checkpoint, or a part of it, is of a later version; a damaged one passes.

    The manifest is decoded as a whole, and of the array files the headers are read. Metrics are read last, for they
    may be added at any time.
    """
    name = os.path.join(path, MANIFEST)
    try:
        data = read_file(disk, name)
        with gc_paused():  # three times as fast
            found = manifest.decode(data, name)
    except (CorruptError, FileNotFoundError, NotADirectoryError):
        return
    manifest.check_known(found, name)
    for file in found.files:
        files.check_version(disk, os.path.join(path, file.name), file)
    with contextlib.suppress(UnreadableError):
        for _, late in metrics.read(disk, path, manifest.xxh3(data)):
            if isinstance(late, UnsupportedError):
                raise late


def remove_leftovers(disk: Disk, path: str, *, remove_empty: bool = False) -> None:
    """Removes the leftovers of crashed or replaced saves in a directory; with `remove_empty` also the empty directory.

    The files of living writers stay, and so do foreign ones. Errors of the system are logged, not raised: the next
    writer tries again.
    """
    with logged(path):
        if any(OWN_FILES.fullmatch(name) for name in disk.list(path)):
            _remove_leftovers(disk, path)
        if remove_empty and disk.stat(path) and not disk.list(path):
            disk.remove_dir(path)


def _remove_leftovers(disk: Disk, path: str) -> None:
    def left_over() -> list[str]:
        try:
            data = read_file(disk, os.path.join(path, MANIFEST))
            keep, metrics = set(file_names(data)), f"metrics-{xxhash.xxh3_64_hexdigest(data)}-"
        except FileNotFoundError:
            keep, metrics = set(), "/"
        found = [name for name in disk.list(path) if OWN_FILES.fullmatch(name) and name not in keep]
        return [name for name in found if not name.startswith(metrics)]

    synced = False
    try:
        if found := left_over():
            check_removable(disk, path)
        for name in found:
            if _in_a_living_save(disk, path, name):
                continue
            file = os.path.join(path, name)
            with contextlib.suppress(FileNotFoundError), opened(disk, file) as fd:
                # Checked again under the lock: now no living writer can commit this file any more.
                free = disk.lock(fd)
                if free is None:  # over NFS a file open for reading cannot get it; two cleaners may share the other
                    free = disk.lock_shared(fd)
                if free is None:
                    warn_of_no_locks(path)
                if free and name in left_over() and disk.same_file(fd, file):  # not a new one under its name
                    if not synced:  # the manifest that no longer names it must outlive a power cut
                        disk.sync_dir(path)
                        synced = True
                    disk.unlink(file)
    except (CorruptError, UnsupportedError):
        return  # the files of a damaged checkpoint, or of one of a later version, cannot be known


def _in_a_living_save(disk: Disk, path: str, name: str) -> bool:
    """Whether the save that an array file belongs to may still commit: its temporary manifest is locked.

    The process that wrote the file may be gone; process 0, which commits, is not.
    """
    if not name.startswith("arrays-"):
        return False
    try:
        with opened(disk, os.path.join(path, f"{MANIFEST}.{name.split('-')[1]}.tmp")) as fd:
            return disk.lock_shared(fd) is False
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def logged(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _log.warning("%s: tidying up failed: %s", path, error)


def delete(disk: Disk, path: str) -> None:
    """Removes a checkpoint: the manifest first, so that it is gone at once and as a whole."""
    unpublish(disk, path)()


def unpublish(disk: Disk, path: str) -> Callable[[], None]:
    """Removes the manifest of a checkpoint, which is quick; returns a function that removes its files, which is not.

    Raises `UnsupportedError` for a checkpoint of a later release.
    """
    manifest = os.path.join(path, MANIFEST)
    check_removable(disk, path)
    names = consists_of(disk, path)
    with contextlib.suppress(FileNotFoundError):  # another process is deleting it, too
        disk.unlink(manifest)

    def remove_files() -> None:
        with contextlib.suppress(FileNotFoundError):  # another process has removed the directory as well
            disk.sync_dir(path)  # or after a power cut the manifest might be there without its files
        remove(disk, path, names)
        remove_leftovers(disk, path, remove_empty=True)

    return remove_files


def consists_of(disk: Disk, path: str) -> list[str]:
    """The files that a manifest names, and the metrics that were added to it.

    [] when the manifest cannot be read: `remove_leftovers` finds them once it is gone.
    """
    try:
        data = read_file(disk, os.path.join(path, MANIFEST))
        added = f"metrics-{xxhash.xxh3_64_hexdigest(data)}-"
        return [*file_names(data), *(name for name in disk.list(path) if name.startswith(added))]
    except (CorruptError, UnsupportedError, OSError):
        return []


def remove(disk: Disk, path: str, names: Iterable[str]) -> None:
    """Removes the files of a manifest that is durably gone: no writer can commit them any more."""
    failed: OSError | None = None
    for name in names:
        try:
            disk.unlink(os.path.join(path, name))
        except FileNotFoundError:
            pass
        except OSError as error:
            failed = failed or error
    if failed:
        raise failed
