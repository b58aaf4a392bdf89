"""A new file that is being written; see `Sink` in `stores.store`."""

import contextlib
import errno
import os
import shutil
from collections.abc import Hashable

from .posix import Disk, Entry, Opened, open_trusted
from .read_errors import is_full
from .store import FinishedFile


class FileSink:
    """A file that is open for writing, and locked until it is closed.

    Raises `FileExistsError` if the file exists, or if another process took it for a leftover before it was locked.
    """

    stored = None
    _fd = -1
    _folder_fd: int | None = None  # its own descriptor of the folder, so that each operation need not open it

    def __init__(self, disk: Disk, path: str):
        self.path = self.place = path  # `place` is the file's name in its folder, which is open until `close`
        self._disk = disk
        if not isinstance(path, Entry) and (folder_fd := open_trusted(os.path.dirname(path))) is not None:
            self._folder_fd, self.place = folder_fd, Entry(path, folder_fd)
        try:
            self._fd = disk.create(self.place)
            is_taken = disk.lock(self._fd) is False or not disk.same_file(self._fd, path)
        except BaseException:
            if self._fd >= 0:
                with contextlib.suppress(OSError):
                    disk.unlink(self.place)
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
        sink.path = sink.place = path
        sink._disk = disk
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
        try:
            self._disk.preallocate(self._fd, nbytes)
        except OSError as error:
            raise self._naming_full_disk(error, nbytes) from None

    def write(self, data: memoryview, offset: int) -> None:
        try:
            self._disk.write(self._fd, data, offset)
        except OSError as error:
            raise self._naming_full_disk(error, len(data)) from None

    def finish(self, nbytes: int, *, read_only: bool = False, same_as: FinishedFile | None = None) -> None:
        try:
            self._disk.truncate(self._fd, nbytes)
            if read_only:
                self._disk.make_read_only(self._fd)
            self._disk.sync(self._fd)
        except OSError as error:
            raise self._naming_full_disk(error, 0) from None

    def _naming_full_disk(self, error: OSError, nbytes: int) -> OSError:
        """Returns the error of a full disk with the path, the bytes that were needed, and those that are free."""
        if not is_full(error) or error.filename is not None:
            return error
        needed = f"{nbytes} bytes were" if nbytes else "room was"
        free = shutil.disk_usage(os.path.dirname(self.path)).free
        text = f"{os.strerror(error.errno or 0)}, {needed} needed, {free} are free"
        return OSError(error.errno, text, str(self.path))

    def publish(self, path: str, *, overwrite: bool, version: Hashable | None = None) -> None:
        if self._folder_fd is not None and os.path.dirname(path) == os.path.dirname(self.path):
            path = Entry(path, self._folder_fd)
        (self._disk.rename if overwrite else self._disk.link)(self.place, path)

    def is_at(self, path: str) -> bool:
        return self._disk.same_file(self._fd, path)

    def close(self) -> None:
        # Cleared first: a child forked in between must not close a reused number.
        fd, self._fd, folder_fd, self._folder_fd, self.place = self._fd, -1, self._folder_fd, None, self.path
        try:
            if fd >= 0:
                self._disk.close(fd)
        finally:
            if folder_fd is not None:
                os.close(folder_fd)
