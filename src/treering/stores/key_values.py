"""Makes a store of anything that keeps bytes under names: a database, a service, a dictionary.

>>> from treering import stores
>>> from treering.stores.key_values import KeyValueStore
>>> stores.register(KeyValueStore(MyDatabase("runs.db")), "mydb")
>>> tr.save("mydb://gpt/step-1", state)
"""

import contextlib
import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from ..errors import RequestError, TreeringError
from .buffers import aligned, copy
from .objects.bucket import MAX_UNCOPIED_BYTES, Bucket, ObjectMeta, Version
from .objects.keys import relative_key
from .objects.request_errors import ChangedError, missing
from .objects.store import ObjectStore

_NO_BYTES = memoryview(b"")


class Value(NamedTuple):
    """What is stored under a key: its size in bytes, when it was written, and its version.

    `modified` is in seconds since the epoch, by one clock for all processes, because it decides which writers live.
    Each write makes another version.
    """

    key: str
    nbytes: int
    modified: float
    version: str


class KeyValues(Protocol):
    """Bytes by key. A key is text such as ``gpt/step-1/a.json``. Several threads and processes call at once."""

    def stat(self, key: str) -> Value | None:
        """Returns the value of a key, without its bytes; None if there is none."""
        ...

    def list(self, prefix: str) -> Iterable[Value]:
        """Returns all values whose keys begin with a prefix, in any order."""
        ...

    def read(self, key: str, begin: int, end: int) -> tuple[bytes, Value]:
        """Returns bytes of a value, fewer if it ends before `end`, and that value. Raises `FileNotFoundError`."""
        ...

    def write(self, key: str, data: bytes, *, exclusive: bool, replaces: str | None) -> Value:
        """Writes all of a value, durably and in one step. Returns it.

        exclusive: raises `FileExistsError` if the key has a value.
        replaces: raises `FileExistsError` unless the value has this version.
        """
        ...

    def delete(self, key: str) -> None:
        """Removes a value, if it exists."""
        ...


class KeyValueStore(ObjectStore):
    """A `Store` whose bytes are in a `KeyValues`. It writes, renews leases and recovers as it does in a bucket."""

    def __init__(self, values: KeyValues):
        super().__init__()
        self.values = values

    def _make_bucket(self, url: str) -> Bucket:
        return _ValuesBucket(url, self.values)


class _ValuesBucket(Bucket):
    """Sends the requests of a `Bucket` to a `KeyValues`. Keys there begin with the host of the URL."""

    def __init__(self, url: str, values: KeyValues):
        super().__init__(url, values)
        self._values, self._place = values, url.partition("://")[2]

    def head(self, key: str) -> ObjectMeta | None:
        with self.translate_errors(key):
            found = self._values.stat(self._full(key))
        return found and self._meta(found)

    def _bytes(
        self, key: str, begin: int, end: int, version: Version | None, into: memoryview = _NO_BYTES
    ) -> tuple[Any, ObjectMeta]:
        with self.translate_errors(key):
            try:
                came, value = self._values.read(self._full(key), begin, end)
            except FileNotFoundError:
                raise missing(self.url, key) from None
        found = self._meta(value)
        if version is not None and version != found.version:
            raise ChangedError(17, "replaced", f"{self.url}/{key}")
        if not into and len(came) <= MAX_UNCOPIED_BYTES:
            return came, found
        own = len(came) - (len(into) if end <= found.nbytes else 0)
        data = aligned(own)[:own] if own else _NO_BYTES
        for target, source in ((data, came[:own]), (into, came[own:])):
            if source:
                copy(target, memoryview(source))
        return data, found

    def put(self, key: str, data: Any, *, replaces: Version | None = None, overwrite: bool = False) -> Version:
        exclusive = replaces is None and not overwrite
        with self.translate_errors(key):
            try:
                value = self._values.write(
                    self._full(key),
                    bytes(data),
                    exclusive=exclusive,
                    replaces=None if replaces is None or overwrite else replaces[0],
                )
            except FileExistsError:
                raise ChangedError(17, "exists, or was replaced", f"{self.url}/{key}") from None
        return self._meta(value).version

    def list(self, key: str) -> tuple[list[ObjectMeta], list[str]]:
        below = f"{key}/" if key else ""
        objects, folders = list[ObjectMeta](), set[str]()
        for one in self.list_all(key):
            name, slash, _ = one.key[len(below) :].partition("/")
            if slash:
                folders.add(below + name)
            else:
                objects.append(one)
        return objects, sorted(folders)

    def list_at_most(self, key: str, most: int | None) -> "list[ObjectMeta] | None":
        with self.translate_errors(key):
            listed = self._values.list(self._full(f"{key}/" if key else ""))
            found = [self._meta(one) for one in itertools.islice(listed, None if most is None else most + 1)]
        return None if most is not None and len(found) > most else found

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with self.translate_errors(key):
                self._values.delete(self._full(key))

    def copy(self, key: str, other: str) -> None:
        found = self.head(key)
        if found is None:
            raise missing(self.url, key)
        data, _ = self._bytes(key, 0, found.nbytes, found.version)
        self.put(other, data, overwrite=True)

    @contextlib.contextmanager
    def writer(self, key: str, part_bytes: int, parts: int) -> Iterator[io.BytesIO]:
        data = io.BytesIO()
        yield data
        self.put(key, data.getbuffer(), overwrite=True)

    def _is_put_refused(self, key: str, replaces: Version | None) -> bool:
        try:
            self.put(key, b"trial", replaces=replaces)
        except ChangedError:
            return True
        return False

    @contextlib.contextmanager
    def translate_errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except (OSError, TreeringError):
            raise
        except Exception as error:
            raise RequestError(f"{self.url}/{key}: the store did not answer as it should: {error}") from error

    def _full(self, key: str) -> str:
        return f"{self._place}/{key}"

    def _meta(self, value: Value) -> ObjectMeta:
        return ObjectMeta(relative_key(self._place, value.key), value.nbytes, value.modified, (value.version, None))
