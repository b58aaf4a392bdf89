"""The floor: the same bytes moved by the plainest good program, without a format, names or checksums."""

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

_BUFFER_BYTES = 4 << 20
_WRITERS = 4
_READERS = 4

Slices = list[tuple[int, np.ndarray]]  # where in a buffer which bytes go


def write_large(path: str, views: Sequence[np.ndarray]) -> None:
    """Writes full buffers directly into a preallocated file; durable."""
    chunks = list(_chunks(views))
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_DIRECT)
    os.posix_fallocate(fd, 0, _BUFFER_BYTES * (len(chunks) - 1) + _round_to_pages(_length(chunks[-1])))

    def put(buffer: mmap.mmap, n: int) -> None:
        target = np.frombuffer(buffer, np.uint8)
        for begin, view in chunks[n]:
            np.copyto(target[begin : begin + len(view)], view)
        size = _round_to_pages(_length(chunks[n]))
        assert os.pwrite(fd, memoryview(buffer)[:size], n * _BUFFER_BYTES) == size

    _in_threads(_WRITERS, put, len(chunks))
    os.close(fd)
    sync(path)


def write_small(path: str, views: Sequence[np.ndarray]) -> None:
    """One write per leaf through the page cache; durable."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
    offset = 0
    for view in views:
        offset += os.pwrite(fd, view.data, offset)
    os.close(fd)
    sync(path)


def read_large(path: str) -> None:
    """Reads all of the file directly into buffers that are reused."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def get(buffer: mmap.mmap, n: int) -> None:
        os.preadv(fd, [buffer], n * _BUFFER_BYTES)

    _in_threads(_READERS, get, -(-os.fstat(fd).st_size // _BUFFER_BYTES))
    os.close(fd)


def check(path: str, views: Sequence[np.ndarray]) -> None:
    """Raises `AssertionError` unless the file begins with the bytes."""
    written = np.memmap(path, np.uint8, "r")
    offset = 0
    for view in views:
        assert np.array_equal(written[offset : offset + len(view)], view), (
            f"floor: not what was to be written at {offset}"
        )
        offset += len(view)


def _chunks(views: Sequence[np.ndarray]) -> Iterator[Slices]:
    """Cuts the leaves, laid end to end, into buffers."""
    chunk: Slices = []
    filled = 0
    for view in views:
        rest = view
        while len(rest):
            part, rest = rest[: _BUFFER_BYTES - filled], rest[_BUFFER_BYTES - filled :]
            chunk.append((filled, part))
            filled += len(part)
            if filled == _BUFFER_BYTES:
                yield chunk
                chunk, filled = [], 0
    if chunk:
        yield chunk


def _length(chunk: Slices) -> int:
    begin, view = chunk[-1]
    return begin + len(view)


def _round_to_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _in_threads(count: int, work: Callable[[mmap.mmap, int], None], jobs: int) -> None:
    """Calls `work(buffer, n)` for every job; each thread has one buffer."""
    rest = iter(range(jobs))  # advanced by one C call, so threads need no lock to share it
    errors: list[BaseException] = []

    def loop() -> None:
        try:
            buffer = mmap.mmap(-1, _BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            buffer.madvise(mmap.MADV_HUGEPAGE)  # few segments per request: the disk takes them faster, and evenly so
            for n in rest:
                work(buffer, n)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def sync(path: str) -> None:
    """Makes a file and its name durable."""
    for name in (path, os.path.dirname(path)):
        fd = os.open(name, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
