"""The copies of one file: one on this host, those on other hosts, and one in the remote tier."""

import enum
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import CorruptError, PeerError
from .store import Blob

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
