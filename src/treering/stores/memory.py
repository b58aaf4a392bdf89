"""A store in the memory of this process, for tests."""

import itertools
import threading
import time

from .._threads.forks import free_in_children
from .key_values import KeyValueStore, Value


class MemoryValues:
    """Bytes by key in a dictionary. `stores.key_values.KeyValues` documents the methods."""

    def __init__(self) -> None:
        self.data: dict[str, tuple[Value, bytes]] = {}
        self._lock = free_in_children(threading.RLock())
        self._versions = itertools.count()

    def stat(self, key: str) -> Value | None:
        found = self.data.get(key)
        return found and found[0]

    def list(self, prefix: str) -> "list[Value]":
        with self._lock:
            return [value for key, (value, _) in self.data.items() if key.startswith(prefix)]

    def read(self, key: str, begin: int, end: int) -> tuple[bytes, Value]:
        try:
            value, data = self.data[key]
        except KeyError:
            raise FileNotFoundError(key) from None
        return data[begin:end], value

    def write(self, key: str, data: bytes, *, exclusive: bool, replaces: str | None) -> Value:
        with self._lock:
            found = self.stat(key)
            if (found and exclusive) or (replaces is not None and (found is None or found.version != replaces)):
                raise FileExistsError(key)
            value = Value(key, len(data), time.time(), f"v{next(self._versions)}")
            self.data[key] = value, data
            return value

    def delete(self, key: str) -> None:
        with self._lock:
            self.data.pop(key, None)


class MemoryStore(KeyValueStore):
    """A `KeyValueStore` of `MemoryValues`."""

    is_in_memory = True
    values: MemoryValues

    def __init__(self) -> None:
        super().__init__(MemoryValues())
