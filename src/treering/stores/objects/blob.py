"""An object that is open for reading. See `stores.store.Blob`."""

import logging
import mmap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..._threads.pool import in_parallel
from ...errors import CorruptError
from ..buffers import Range, copy
from ..read_errors import ReplacedError, reading
from .bucket import Bucket, ObjectMeta
from .listing_cache import ListingCache
from .request_errors import ChangedError
from .upload import OBJECT_BYTES

_MIN_TAKEN_PART = 0.75  # least part of the fetched bytes that a caller may take, because it keeps all of their memory
_log = logging.getLogger("treering")
_PREFETCH_BYTES = 1 << 20  # bytes that are fetched on opening: they take no longer than a request without data


class _PrefetchedRun(NamedTuple):
    """Bytes that were fetched when an object was opened: the offset of the first, and the memory that holds them."""

    begin: int
    memory: memoryview


class ObjectBlob:
    """An object in the version that it had when it was opened. Reading another version raises `ReplacedError`."""

    local = has_holes = False
    readers, read_bytes = 16, 8 << 20

    def __init__(
        self,
        bucket: Bucket,
        key: str,
        expected: int = 0,
        cache: ListingCache | None = None,
        into: memoryview | None = None,
    ):
        self.path = f"{bucket.url}/{key}"
        self._bucket, self._key = bucket, key
        nbytes = min(expected or _PREFETCH_BYTES, OBJECT_BYTES + _PREFETCH_BYTES)
        if into is not None and nbytes == expected:
            head, found = bucket.get_prefix(key, nbytes, into)
        else:
            into = None
            head, found = (cache or bucket).get_prefix(key, nbytes)
        self.size, self._meta = found.nbytes, found
        if found.version[0] is None and found.modified <= 0:
            _log.warning(
                "%s: the server sends neither an ETag nor Last-Modified; if the file is replaced while it is open, "
                "Treering does not notice",
                self.path,
            )
        came = [_PrefetchedRun(0, memoryview(head))]
        if into is not None and nbytes <= found.nbytes:
            came.append(_PrefetchedRun(nbytes - len(into), into))
        # At most one element. There is no lock, because a signal handler may read this blob too.
        self._prefetched = [came]

    def check_is(self, found: ObjectMeta) -> None:
        """Raises `ReplacedError` unless this is the object that was found, in that version."""
        if not self._meta.is_same(found):
            raise ReplacedError(f"{self.path}: it was replaced while the folder was read; open it again")

    def read_into(self, target: memoryview, offset: int) -> None:
        end = offset + len(target)
        if offset < 0 or end > self.size:
            raise CorruptError(f"{self.path}: expected {end} bytes, found {self.size}; it is cut short")
        held = 0
        for came in tuple(self._prefetched):
            for begin, memory in came:
                count = max(min(begin + len(memory), end) - offset - held, 0)
                first = offset + held - begin
                copy(target[held : held + count], memory[first : first + count])
                held += count
            if not any(one is came for one in self._prefetched):
                held = 0  # `take` gave this memory to a caller meanwhile, who may have written to it

        def read(begin: int) -> None:
            stop = min(begin + self.read_bytes, end)
            with reading(self.path):
                try:
                    self._bucket.read_into(target[begin - offset : stop - offset], self._key, begin, self._meta)
                except (ChangedError, FileNotFoundError):
                    raise ReplacedError(
                        f"{self.path}: it was replaced or deleted while it was open; open it again"
                    ) from None

        in_parallel(list(range(offset + held, end, self.read_bytes)), read, self.readers)

    def read_again(self, target: memoryview, offset: int) -> None:
        self.forget()
        self.read_into(target, offset)

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

    def populate(self, mapped: mmap.mmap, ranges: Iterable[Range]) -> None: ...

    def take(self, ranges: Sequence[Range]) -> list[memoryview] | None:
        wanted = sum(end - begin for begin, end in ranges)
        try:
            came = self._prefetched.pop()  # in one step, so that the memory has one owner
        except IndexError:
            return None
        for first, memory in came:
            behind = first + len(memory)
            inside = all(first <= begin and end <= behind for begin, end in ranges)
            if inside and not memory.readonly and wanted >= len(memory) * _MIN_TAKEN_PART:
                return [memory[begin - first : end - first] for begin, end in ranges]
        self._prefetched.append(came)
        return None

    def forget(self) -> None:
        self._prefetched.clear()

    def close(self) -> None:
        self.forget()
