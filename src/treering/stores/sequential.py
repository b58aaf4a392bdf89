"""A file that is written from start to end and is durable when it is closed."""

import contextlib
from collections.abc import Iterator

from .buffers import aligned, round_up
from .store import Sink, Store, Writer

_BUFFER_BYTES = 4 << 20


@contextlib.contextmanager
def file_of_new_folder(store: Store, path: str) -> Iterator[Writer]:
    """Yields a file to write in a folder that is not in place yet. The file is durable after the `with` block."""
    sink = store.create(path)
    try:
        file = SequentialWriter(sink)
        yield file
        file.sync()
    finally:
        sink.close()


class SequentialWriter:
    """Writes a file from start to end, through an aligned buffer."""

    def __init__(self, sink: Sink):
        self.path, self.size = sink.path, 0
        self.sink = sink
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
        """Makes the file durable. Nothing can be written afterwards."""
        self._flush()
        self.sink.finish(self.size)

    def _flush(self) -> None:
        if self._filled:
            self.sink.write(self._buffer[: round_up(self._filled)], self._flushed)
            self._flushed += self._filled
            self._filled = 0
