"""A file of which several places have a copy, open for reading: if one copy cannot be read, the next one is."""

import contextlib
import logging
import mmap
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from ..errors import CorruptError, PeerError
from .file_copies import FileCopy, Place, StoredCopy
from .ranges import Range
from .read_errors import ReplacedError, is_momentary
from .store import Blob

_log = logging.getLogger("treering")


class CopiedFile:
    """A file with at least one copy. See `stores.store.Blob`.

    `read_again` takes bytes from the second copy that is left. So a block whose checksum is wrong, which the reader of
    the native format reads again, comes from another copy.
    """

    has_holes = False
    readers, read_bytes = 4, 4 << 20

    def __init__(self, path: str, size: int, copies: Sequence[FileCopy], count: Callable[[Place, int], None]):
        """`copies` are in the order in which they are read. Each read calls `count` with its place and its bytes."""
        self.path, self.size = path, size
        self._copies, self._count = copies, count
        self._errors: dict[FileCopy, Exception] = {}  # of the copies that failed

    @property
    def local(self) -> bool:
        return (blob := self._first_here()) is not None and blob.local

    def read_into(self, target: memoryview, offset: int) -> None:
        self._read(target, offset, again=False)

    def read_again(self, target: memoryview, offset: int) -> None:
        self._read(target, offset, again=True)

    def _read(self, target: memoryview, offset: int, *, again: bool) -> None:
        if not len(target):  # Callers may ask for the nothing after the last block.
            return
        if offset < 0 or offset + len(target) > self.size:
            raise CorruptError(f"{self.path}: expected {offset + len(target)} bytes, found {self.size}")
        # If all have failed, the cause may have been momentary: all are tried again.
        copies = [one for one in self._copies if one not in self._errors and not one.is_avoided] or [*self._copies]
        if again and len(copies) > 1:
            copies = [*copies[1:], copies[0]]
            _log.warning("%s: bytes from %s are read again from %s", self.path, copies[-1].name, copies[0].name)
        for copy in copies:
            try:
                copy.read_into(target, offset)
            except (OSError, CorruptError) as error:
                _log.warning("%s: the copy on %s cannot be read: %s", self.path, copy.name, error)
                self._errors[copy] = error
            else:
                self._count(copy.place, len(target))
                return
        self._raise_error()

    def _raise_error(self) -> NoReturn:
        """Raises the error that all copies together stand for: one that may pass, else damage, else absence."""
        errors = list(self._errors.values())
        for error in errors:
            if isinstance(error, PeerError):
                raise PeerError("; ".join(map(str, errors))) from error
        for is_cause in (is_momentary, _is_damage, lambda error: not isinstance(error, FileNotFoundError)):
            for error in filter(is_cause, errors):
                raise error
        raise ReplacedError(f"{self.path}: it was deleted from every place that had it; open the step again")

    def read(self, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def read_up_to(self, nbytes: int) -> bytes:
        return self.read(0, min(nbytes, self.size))

    def take(self, ranges: Sequence[Range]) -> list[memoryview] | None:
        return None

    def forget(self) -> None: ...

    def mapped(self, ranges: Sequence[Range]) -> mmap.mmap | None:
        return blob.mapped(ranges) if (blob := self._first_here()) else None

    def populate(self, mapped: mmap.mmap, ranges: Iterable[Range]) -> None:
        if blob := self._first_here():
            blob.populate(mapped, ranges := list(ranges))
            self._count(Place.HERE, sum(end - begin for begin, end in ranges))

    def close(self) -> None: ...

    def _first_here(self) -> Blob | None:
        """Returns the open copy on this host, if that is the first copy and can be opened. It stays open."""
        first = self._copies[0]
        if isinstance(first, StoredCopy) and first.place is Place.HERE:
            with contextlib.suppress(OSError, CorruptError):  # `read_into` reports it.
                return first.blob()
        return None


def _is_damage(error: Exception) -> bool:
    return isinstance(error, CorruptError)
