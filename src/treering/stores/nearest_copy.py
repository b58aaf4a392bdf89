"""A store with the files of one step, of which several hosts and the remote tier may have copies. Reads the nearest."""

import collections
import contextlib
import enum
import errno
import functools
import logging
import mmap
import os
import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

from .._core import units
from ..errors import CorruptError, PeerError
from .buffers import Range
from .read_errors import ReplacedError, is_momentary
from .store import Blob, Stat, Store

_REQUEST_BYTES = 4 << 20  # bytes of a request to a peer; one for very many would not end in the time that it has


class Place(enum.Enum):
    """The kind of place that has a copy of a file."""

    HERE = "this host"
    PEERS = "peers"
    REMOTE = "the remote tier"


class FileCopy(Protocol):
    """A copy of a file. `place` and `name` say where it is. `is_avoided` is True if others are to be tried first."""

    @property
    def place(self) -> Place: ...

    @property
    def name(self) -> str: ...

    @property
    def is_avoided(self) -> bool: ...

    def read_into(self, target: memoryview, offset: int) -> None: ...


class StoredCopy:
    """A copy in a store that this process reads. `open` is called when it is first read."""

    is_avoided = False

    def __init__(self, place: Place, open: Callable[[], Blob], nbytes: int):
        self.place, self.name, self._open, self._nbytes = place, place.value, open, nbytes
        self._blob: Blob | None = None

    def blob(self) -> Blob:
        """Returns the open file. Raises `CorruptError` if it has another size, and the errors of opening."""
        if self._blob is None:
            blob = self._open()
            if blob.size != self._nbytes:
                raise CorruptError(f"{blob.path}: expected {self._nbytes} bytes, found {blob.size}")
            self._blob = blob
        return self._blob

    def read_into(self, target: memoryview, offset: int) -> None:
        self.blob().read_again(target, offset)


class BytesCopy:
    """A copy in memory."""

    place, name, is_avoided = Place.HERE, "memory", False

    def __init__(self, data: bytes):
        self._data = data

    def read_into(self, target: memoryview, offset: int) -> None:
        target[:] = self._data[offset : offset + len(target)]


class Peers(Protocol):
    """Reads the files of other hosts. `treering._processes.peer_files.PeerFiles` describes the attributes."""

    index: int
    host: int

    def read_into(
        self, process: int, folder: str, name: str, target: memoryview, offset: int, version: Any = None
    ) -> Any: ...


class PeerCopy:
    """A copy on the host of another process. `unreachable` are the processes that could not be reached."""

    place, _version = Place.PEERS, None

    def __init__(self, peers: Peers, process: int, folder: str, name: str, unreachable: set[int]):
        self.name = f"the host of process {process}"
        self._peers, self._process, self._unreachable = peers, process, unreachable
        self._path = folder, name

    @property
    def is_avoided(self) -> bool:
        return self._process in self._unreachable

    def read_into(self, target: memoryview, offset: int) -> None:
        try:
            for begin in range(0, len(target), _REQUEST_BYTES):
                part = target[begin : begin + _REQUEST_BYTES]
                self._version = self._peers.read_into(
                    self._process, *self._path, part, offset + begin, version=self._version
                )
        except PeerError:
            self._unreachable.add(self._process)
            raise


_log = logging.getLogger("treering")


class HeldFile(NamedTuple):
    """The size of a file in bytes, and the processes on whose hosts it is, in the same order in all processes."""

    nbytes: int
    holders: Sequence[int]


class NearestCopyStore:
    """The files of the step at `path`, as a store: the readers of checkpoints need not know where the copies are.

    It has only those methods of `stores.store.Store` that read.

    local: the store of this host's local tier, where the folder `path` has some of the files.
    small: the contents of small files by name, such as the manifest. No copy of them is read.
    held: the array files of the step, by name. If no host has a file, only `remote` has it.
    remote: the store of the remote tier, and the folder there that has every file of the step.

    The copy on this host is read first, and the remote one last. Between them are the other hosts, in an order that
    differs between the processes, so that the hosts share the load. A host that cannot be reached is tried
    again only when no other copy is left.
    """

    has_folders, object_bytes = True, None  # as in a directory, because that is what `path` is

    def __init__(
        self,
        peers: Peers,
        local: Store,
        path: str,
        small: Mapping[str, bytes],
        held: Mapping[str, HeldFile],
        remote: tuple[Store, str] | None = None,
    ):
        self.has_locks = local.has_locks
        self._peers, self._local, self._path, self._held = peers, local, path, held
        self._remote, self._small = remote, small
        self._unreachable: set[int] = set()
        # Appending is atomic. An interrupt could leave a lock held.
        self._reads: dict[Place, collections.deque[int]] = {place: collections.deque() for place in Place}

    @property
    def read_bytes(self) -> dict[Place, int]:
        """The number of bytes that were read from each place so far."""
        return {place: sum(counts.copy()) for place, counts in self._reads.items()}

    def stat(self, path: str) -> Stat | None:
        name = self._name(path)
        if not name:
            return Stat("folder", 0, 0.0, 0)
        if (data := self._small.get(name)) is not None:
            return Stat("file", len(data), 0.0, len(data))
        nbytes, holders = self._held.get(name, (0, ()))
        return Stat("file", nbytes, 0.0, nbytes) if holders or (self._remote and name in self._held) else None

    def list(self, path: str) -> "list[str]":
        if self._name(path):
            return []
        return sorted({*self._small, *(name for name in self._held if self.stat(f"{path}/{name}"))})

    def open(self, path: str, *, expected: int = 0, into: memoryview | None = None) -> Blob:
        name = self._name(path)
        if (data := self._small.get(name)) is not None:
            return CopiedFile(path, len(data), [BytesCopy(data)], lambda place, nbytes: None)
        if name in self._held and (copies := self._copies(path, name)):
            return CopiedFile(path, self._held[name].nbytes, copies, self._count)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def glance(self, path: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_local(self, path: str) -> bool:
        # The disk of this host has all array files. Otherwise some are read over the network.
        return all(self._peers.host in one.holders for one in self._held.values())

    def is_link(self, path: str) -> bool:
        return False

    def real_path(self, path: str) -> str:
        # The path that the step has, or would have, in the local tier.
        return self._local.real_path(path)

    def log_reads(self) -> None:
        """Logs how many bytes were read from which place."""
        amounts = ", ".join(f"{units.nbytes(count)} from {place.value}" for place, count in self.read_bytes.items())
        _log.info("%s: read %s", self._path, amounts)

    def _copies(self, path: str, name: str) -> "list[FileCopy]":
        """Returns the copies of a file in the order in which they are to be read."""
        nbytes, holders = self._held[name]
        begin = self._peers.index % max(len(holders), 1)
        order = [*holders[begin:], *holders[:begin]]
        order.sort(key=lambda process: process != self._peers.host)
        folder = posixpath.basename(self._path)
        copies: list[FileCopy] = [
            StoredCopy(Place.HERE, functools.partial(self._local.open, path), nbytes)
            if process == self._peers.host
            else PeerCopy(self._peers, process, folder, name, self._unreachable)
            for process in order
        ]
        if self._remote:
            copies.append(
                StoredCopy(Place.REMOTE, functools.partial(self._remote[0].open, self._remote_path(name)), nbytes)
            )
        return copies

    def _count(self, place: Place, nbytes: int) -> None:
        self._reads[place].append(nbytes)

    def _name(self, path: str) -> str:
        """Returns the name of a file of the step, or "" for the step itself."""
        return "" if path == self._path else posixpath.relpath(path, self._path)

    def _remote_path(self, name: str) -> str:
        assert self._remote
        return posixpath.join(self._remote[1], name)


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
