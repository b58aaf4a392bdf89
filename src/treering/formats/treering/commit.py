"""The commit of a checkpoint: array files first, all durable, then the manifest in one step, then tidying up.

A directory is a checkpoint when it holds the manifest. Array files are written under names that no other
save uses; the manifest is put in place last. A writer holds the lock of each of its files until its commit
is over, so a process that gets a file's lock and then finds it in no manifest knows that it is left over.
"""

import contextlib
import logging
import os
import secrets
import stat
from collections.abc import Callable

from ...errors import ExistsError, SaveError
from ...stores.buffers import aligned
from ...stores.posix import Disk
from ...stores.whole_files import make_dirs
from .new_files import CREATE_ATTEMPTS, Files
from .removal import check_removable, consists_of, logged, remove, remove_leftovers
from .schema import MANIFEST, OWN_FILES

_log = logging.getLogger("treering")


def check_free(disk: Disk, path: str, *, overwrite: bool) -> None:
    """Raises `ExistsError` when a save to `path` would touch something it must not."""
    found = disk.stat(path)
    if found is None:
        parent = os.path.dirname(path)
        while (above := disk.stat(parent)) is None and parent != os.path.dirname(parent):
            parent = os.path.dirname(parent)
        if above is not None and not stat.S_ISDIR(above.st_mode):
            raise ExistsError(f"{path}: expected to create a directory, but {parent} is a file; choose another path")
        return
    if not stat.S_ISDIR(found.st_mode):
        raise ExistsError(f"{path}: expected a free path, found a file; choose another path or remove it")
    names = disk.list(path)
    if MANIFEST in names:
        if not overwrite:
            raise ExistsError(f"{path}: expected a free path, found a checkpoint; pass overwrite=True to replace it")
        return
    if other := [name for name in names if not OWN_FILES.fullmatch(name)]:
        shown = ", ".join(other[:3]) + (", …" if len(other) > 3 else "")
        raise ExistsError(f"{path}: expected a free path, found a directory with {shown}; choose a path below it")


class Transaction(Files):
    """One save into one directory: invisible to readers until `commit`, gone without a trace after `abort`.

    Process 0 makes the temporary manifest first: it shows the others that they write to the same file system.
    """

    def __init__(self, disk: Disk, path: str, *, overwrite: bool):
        check_free(disk, path, overwrite=overwrite)
        if overwrite:
            check_removable(disk, path)
        super().__init__(disk, path, secrets.token_hex(3))
        self._overwrite = overwrite
        self._manifest = os.path.join(path, MANIFEST)
        remove_leftovers(disk, path)
        name = f"{MANIFEST}.{self.token}.tmp"
        self._temporary = os.path.join(path, name)
        try:
            for attempt in range(CREATE_ATTEMPTS):
                try:
                    self._make_dir()
                    self.create(name)
                    break
                except FileNotFoundError:  # another process removed the empty directory as a leftover
                    if attempt == CREATE_ATTEMPTS - 1:
                        raise
        except BaseException:
            self.abort()
            raise

    def commit(self, manifest: bytes, check: Callable[[], None] = lambda: None) -> None:
        """Publishes the save, unless `check` raises just before. Raises `ExistsError` when another save was first."""
        self.disk.sync_dir(os.path.dirname(self.path))
        self._write(self._open[self._temporary], manifest)
        self.disk.sync_dir(self.path)  # the array files' names come before the manifest that needs them
        for path, fd in self._open.items():
            if not self.disk.same_file(fd, path):
                raise SaveError(f"{path}: removed by another program while the save was under way; do locks work here?")
        check()
        put = self.disk.rename if self._overwrite else self.disk.link
        replaced = consists_of(self.disk, self.path) if self._overwrite else []
        try:
            put(self._temporary, self._manifest)
        except OSError as error:
            if not self._in_place():  # it may be there in spite of the error, over a network
                if not isinstance(error, FileExistsError):
                    raise
                raise ExistsError(
                    f"{self.path}: another writer put a checkpoint there first; it is untouched"
                ) from None
        try:
            self.disk.sync_dir(self.path)
        except OSError as error:
            if not self._overwrite and self._gone():
                raise
            self.committed = True
            raise SaveError(
                f"{self.path}: the new checkpoint is in place, but the disk failed to make that durable ({error}); "
                f"after a power cut it may be {'the old one again' if self._overwrite else 'gone'}"
            ) from error
        self.committed = True
        with logged(self.path):
            if not self._overwrite:
                with contextlib.suppress(FileNotFoundError):  # gone already where a link had to be a rename
                    self.disk.unlink(self._temporary)
        self.close()
        if self._overwrite:
            with logged(self.path):  # the files of the replaced checkpoint, without locks: no save has them
                remove(self.disk, self.path, replaced)
            remove_leftovers(self.disk, self.path)

    def abort(self) -> None:
        """Removes everything this save wrote, unless it is committed, or in place and cannot be taken back."""
        self.committed = self.committed or not self._gone()
        if self.committed:
            self.close()
        else:
            super().abort()

    def _gone(self) -> bool:
        """Whether the manifest of this save is not in place; one that replaced none is removed first."""
        if not self._in_place():
            return True
        if self._overwrite:
            return False
        try:
            self.disk.unlink(self._manifest)  # it is not durable yet
            self.disk.sync_dir(self.path)
        except OSError:
            return not self._in_place()
        return True

    def _in_place(self) -> bool:
        fd = self._open.get(self._temporary)
        with contextlib.suppress(OSError):
            return fd is not None and self.disk.same_file(fd, self._manifest)
        return True  # it may be

    def _write(self, fd: int, data: bytes) -> None:
        buffer = aligned(len(data))
        buffer[: len(data)] = data
        self.disk.write(fd, buffer, 0)
        self.disk.truncate(fd, len(data))
        self.disk.make_read_only(fd)
        self.disk.sync(fd)

    def _make_dir(self) -> None:
        """Makes the directory. The commit makes its name durable; the names of those above it are durable before."""
        if self.disk.stat(self.path) is None:
            make_dirs(self.disk, os.path.dirname(self.path), self.made)
            with contextlib.suppress(FileExistsError):
                self.disk.make_dir(self.path)
                self.made.append(self.path)
