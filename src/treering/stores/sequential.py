"""A file that is written from one end to the other, durable when it is closed."""

from .buffers import aligned, round_up
from .posix import Disk

_BUFFER_BYTES = 4 << 20


class SequentialWriter:
    """A file that is written from one end to the other."""

    def __init__(self, disk: Disk, path: str):
        self.path, self.size = path, 0
        self._disk = disk
        self._fd = disk.create(path)
        self._buffer = aligned(_BUFFER_BYTES)
        self._filled = self._flushed = 0

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        data = memoryview(data).cast("B")
        self.size += len(data)
        while len(data):
            count = min(len(data), _BUFFER_BYTES - self._filled)
            self._buffer[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == _BUFFER_BYTES:
                self._flush()

    def sync(self) -> None:
        """Makes the file durable; nothing can be written any more."""
        self._flush()
        self._disk.truncate(self._fd, self.size)
        self._disk.sync(self._fd)

    def close(self) -> None:
        """Makes the file durable and closes it."""
        self.sync()
        self.discard()

    def lock(self) -> bool:
        """Keeps other writers from removing the file before it is closed; False when they have begun to."""
        return lock(self._disk, self._fd, self.path)

    def discard(self) -> None:
        """Closes the file as it is."""
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def _flush(self) -> None:
        if self._filled:
            self._disk.write(self._fd, self._buffer[: round_up(self._filled)], self._flushed)
            self._flushed += self._filled
            self._filled = 0


def lock(disk: Disk, fd: int, path: str) -> bool:
    """Locks an open file, where there are locks; False when a process that removes leftovers was faster."""
    return disk.lock(fd) is not False and disk.same_file(fd, path)
