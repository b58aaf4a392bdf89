"""The file system as a `Store`, built from the system calls of a `Disk`."""

import contextlib
import errno
import os
import shutil
import stat
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

from ..errors import UnsupportedError
from . import atomic
from .directories import make_dirs, trusted_folder
from .file_io import check_free
from .file_sink import FileSink
from .lease import WriterLock
from .open_file import File
from .posix import Disk
from .store import CheckOthers, FinishedFile, Owned, Stat, Writer


class Filesystem:
    """A file system; `disk` makes its system calls. `stores.store.Store` documents the methods."""

    has_folders = True
    has_locks = True
    sharing: Literal["links", "copies"] | None = "links"
    object_bytes = None

    def __init__(self, disk: Disk):
        self.disk = disk
        self._sinks: weakref.WeakValueDictionary[str, FileSink] = weakref.WeakValueDictionary()

    def stat(self, path: str) -> Stat | None:
        if (found := self.disk.stat(path)) is None:
            return None
        kind = "file" if stat.S_ISREG(found.st_mode) else "folder" if stat.S_ISDIR(found.st_mode) else "other"
        return Stat(kind, found.st_size, found.st_mtime_ns / 1e9, (found.st_ino, found.st_mtime_ns, found.st_size))

    def list(self, path: str) -> "list[str]":
        return self.disk.list(path)

    def open(self, path: str, *, expected: int = 0, into: memoryview | None = None) -> File:
        return File(self.disk, path)

    def glance(self, path: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_local(self, path: str) -> bool:
        try:
            fd = self.disk.open_dir(os.path.realpath(path)) if os.path.isdir(path) else self.disk.open(path)
        except OSError:
            return False
        try:
            return self.disk.is_local(fd)
        finally:
            self.disk.close(fd)

    def free_bytes(self, path: str) -> int | None:
        """Returns the free bytes of the disk with a path, which need not exist; None if the system does not say."""
        with contextlib.suppress(OSError):
            while not os.path.exists(path) and path != os.path.dirname(path):
                path = os.path.dirname(path)
            return shutil.disk_usage(path).free
        return None

    def is_link(self, path: str) -> bool:
        return os.path.islink(path)

    def real_path(self, path: str) -> str:
        return os.path.realpath(path)

    def tensorstore(self, path: str, context: Any, *, writes: bool = False) -> dict[str, Any]:
        if "\\" in path:  # TensorStore takes it for a slash, so it would read and write in another place.
            raise UnsupportedError(
                f"{path}: expected a path without backslashes, which TensorStore takes for slashes; choose another, or "
                "save in the native format"
            )
        return {"driver": "file", "path": os.path.join(path, "")}

    def written_by_tensorstore(self, path: str, context: Any, which: Callable[[str], bool]) -> None: ...

    def create(self, path: str, *, visible: bool = False, expected: int = 0) -> FileSink:
        sink = self._sinks[path] = FileSink(self.disk, path)
        return sink

    def share(self, old: FinishedFile, new: str) -> FileSink | None:
        # A second name of a link would lead to the file of another checkpoint.
        if self.is_link(old.path) or not self.disk.hard_link(old.path, new):
            return None
        sink = FileSink.linked(self.disk, new)
        try:
            found = self.disk.stat(new)
            if found is None or (found.st_ino, found.st_mtime_ns, found.st_size) != old.version:  # as in `stat`
                raise FileNotFoundError(errno.ENOENT, "deleted or replaced", old.path)
            folder = self.disk.stat(os.path.dirname(new))
            if folder and _has_access_of_new(found, folder):
                return sink
        except BaseException:
            self._drop(sink)
            raise
        self._drop(sink)
        return None

    def _drop(self, sink: FileSink) -> None:
        with contextlib.suppress(OSError):
            self.disk.unlink(sink.path)
        sink.close()

    def delete(self, path: str) -> None:
        sink = self._sinks.get(path)
        self.disk.unlink(sink.place if sink else path)

    def delete_all(self, path: str, names: Iterable[str]) -> None:
        failed: OSError | None = None
        if not (listed := list(names)):
            return
        with contextlib.suppress(FileNotFoundError), trusted_folder(path) as folder:
            for name in listed:
                try:
                    self.disk.unlink(folder.entry(name))
                except FileNotFoundError:
                    pass
                except OSError as error:
                    failed = failed or error
        if failed:
            raise failed

    @contextlib.contextmanager
    def unused(self, path: str) -> Iterator[Callable[[], None] | None]:
        parent, name = os.path.split(path)
        with trusted_folder(parent) as folder, atomic.unused(self.disk, folder.entry(name), folder) as remove:
            yield remove

    def make_folder(self, path: str) -> None:
        self.disk.make_dir(path)

    def make_folders(self, path: str, made: "list[str]") -> None:
        make_dirs(self.disk, path, made)

    def remove_folder(self, path: str) -> None:
        self.disk.remove_dir(path)

    def settle(self, path: str) -> None:
        self.disk.sync_dir(path)

    def move(self, old: str, new: str, *, last: str) -> None:
        self.disk.rename_new(old, new)

    def new_file(self, path: str, *, overwrite: bool) -> AbstractContextManager[Writer]:
        check_free(self, path, overwrite=overwrite, folder=False)
        return atomic.new_file(self.disk, path, overwrite=overwrite)

    def new_folder(
        self,
        path: str,
        *,
        overwrite: bool,
        owned: Owned,
        names: Collection[str] = (),
        check_others: CheckOthers | None = None,
    ) -> AbstractContextManager[str]:
        check_free(self, path, overwrite=overwrite, folder=True)
        return atomic.new_directory(
            self.disk,
            path,
            overwrite=overwrite,
            owned=lambda folder: owned(self, folder),
            names=names,
            check_others=check_others and (lambda folder, others: check_others(self, folder, others)),
        )

    def scratch_folder(self, path: str) -> AbstractContextManager[str]:
        return atomic.scratch_directory(self.disk, path)

    def lease(self, run: str, busy: Callable[[], bool] = lambda: False) -> WriterLock:
        return WriterLock(self.disk, run, busy)


def _has_access_of_new(file: os.stat_result, folder: os.stat_result) -> bool:
    """Returns True if the users who may read or change a file are those of a finished file that is new in a folder.

    They differ if the file has another owner, group or mode: then the owner could change it later, others could write
    to it, or readers of the folder could not read it.
    """
    same_group = file.st_gid == folder.st_gid or (file.st_mode >> 3 ^ file.st_mode) & 0o7 == 0
    return file.st_uid == folder.st_uid and same_group and file.st_mode & 0o577 == folder.st_mode & 0o444
