"""A new file that is being written; see `Sink` in `stores.store`."""

import contextlib
import errno
import os
import shutil
from collections.abc import Hashable, Iterator

from .posix import Disk, Opened
from .read_errors import is_full
from .store import FinishedFile


class FileSink:
    """A file that is open for writing, and locked until it is closed.

    Raises `FileExistsError` if the file exists, or if another process took it for a leftover before it was locked.
    """

    stored = None

    def __init__(self, disk: Disk, path: str):
        self.path = path
        self._disk = disk
        self._fd = disk.create(path)
        try:
            is_taken = disk.lock(self._fd) is False or not disk.same_file(self._fd, path)
        except BaseException:
            with contextlib.suppress(OSError):
                disk.unlink(path)
            self.close()
            raise
        if is_taken:
            self.close()
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    @classmethod
    def linked(cls, disk: Disk, path: str) -> "FileSink":
        """Opens a finished file that was just given the name `path`, and syncs it: any program may have written it.

        It is not locked: its other names belong to checkpoints, whose files no process locks.
        """
        sink = cls.__new__(cls)
        sink.path, sink._disk = path, disk
        try:
            sink._fd = disk.open(path)
            disk.sync(sink._fd)
        except BaseException:
            with contextlib.suppress(OSError):
                disk.unlink(path)
            raise
        return sink

    @property
    def opened(self) -> Opened:
        return Opened(self.path, self._fd)

    def preallocate(self, nbytes: int) -> None:
        with self._naming_full_disk(nbytes):
            self._disk.preallocate(self._fd, nbytes)

    def write(self, data: memoryview, offset: int) -> None:
        with self._naming_full_disk(len(data)):
            self._disk.write(self._fd, data, offset)

    def finish(self, nbytes: int, *, read_only: bool = False, same_as: FinishedFile | None = None) -> None:
        with self._naming_full_disk(0):
            self._disk.truncate(self._fd, nbytes)
            if read_only:
                self._disk.make_read_only(self._fd)
            self._disk.sync(self._fd)

    @contextlib.contextmanager
    def _naming_full_disk(self, nbytes: int) -> Iterator[None]:
        """Adds to the error of a full disk the path, the bytes that were needed, and those that are free."""
        try:
            yield
        except OSError as error:
            if is_full(error) and error.filename is None:
                needed = f"{nbytes} bytes were" if nbytes else "room was"
                free = shutil.disk_usage(os.path.dirname(self.path)).free
                text = f"{os.strerror(error.errno or 0)}, {needed} needed, {free} are free"
                raise OSError(error.errno, text, str(self.path)) from None
            raise

    def publish(self, path: str, *, overwrite: bool, version: Hashable | None = None) -> None:
        (self._disk.rename if overwrite else self._disk.link)(self.path, path)

    def is_at(self, path: str) -> bool:
        return self._disk.same_file(self._fd, path)

    def close(self) -> None:
        fd, self._fd = self._fd, -1  # cleared first: a child forked in between must not close a reused number
        if fd >= 0:
            self._disk.close(fd)
