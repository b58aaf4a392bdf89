"""An object that is open for reading. See `stores.store.Blob`."""

import mmap
from collections.abc import Iterable, Sequence

from ..._threads.pool import in_parallel
from ...errors import CorruptError
from ..ranges import Range
from ..read_errors import ReplacedError, reading
from .bucket import Bucket, ChangedError

_HEAD_BYTES = 1 << 20  # bytes that come with opening: reading them takes no longer than asking does
_PART_BYTES = 8 << 20  # bytes that one request reads


class ObjectBlob:
    """An object, of the version that it had when it was opened; reading any other is a `ReplacedError`."""

    local = has_holes = False
    readers = 16

    def __init__(self, bucket: Bucket, key: str):
        self.path = f"{bucket.url}/{key}"
        self._bucket, self._key = bucket, key
        head, found = bucket.beginning(key, _HEAD_BYTES)
        self._head, self.size, self._version = memoryview(head), found.nbytes, found.version

    def read_into(self, target: memoryview, offset: int, *, anew: bool = False) -> None:
        end = offset + len(target)
        if offset < 0 or end > self.size:
            raise CorruptError(f"{self.path}: expected {end} bytes, found {self.size}; it is cut short")
        held = 0 if anew else max(min(len(self._head), end) - offset, 0)
        target[:held] = self._head[offset : offset + held]

        def read(begin: int) -> None:
            stop = min(begin + _PART_BYTES, end)
            with reading(self.path):
                try:
                    target[begin - offset : stop - offset] = self._bucket.read(self._key, begin, stop, self._version)
                except (ChangedError, FileNotFoundError):
                    raise ReplacedError(
                        f"{self.path}: it was replaced or deleted while it was open; open it again"
                    ) from None

        in_parallel(list(range(offset + held, end, _PART_BYTES)), read, self.readers)

    def read(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise CorruptError(f"{self.path}: expected {offset + nbytes} bytes, found {self.size}; it is cut short")
        data = bytearray(nbytes)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def read_up_to(self, nbytes: int) -> bytes:
        return self.read(0, min(nbytes, self.size))

    def mapped(self, ranges: Sequence[Range]) -> mmap.mmap | None:
        return None

    def bring_in(self, mapped: mmap.mmap, begin: int, end: int) -> None: ...

    def bring_all_in(self, mapped: mmap.mmap, ranges: Iterable[Range]) -> None: ...

    def close(self) -> None:
        self._head = memoryview(b"")
