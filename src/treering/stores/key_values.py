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
from .objects.bucket import MAX_UNCOPIED_BYTES, Bucket, ObjectMeta, Version, relative_key
from .objects.request_errors import ChangedError, missing
from .objects.store import ObjectStore

_NO_BYTES = memoryview(b"")
_RETURNED = {  # what each method returns, for messages
    "stat": "a `treering.stores.key_values.Value` or None",
    "list": "`treering.stores.key_values.Value`s",
    "read": "bytes and a `treering.stores.key_values.Value`",
    "write": "a `treering.stores.key_values.Value`",
}


class Value(NamedTuple):
    """What is stored under a key: its size in bytes, when it was written, and its version.

    `modified` is in seconds since the epoch, by one clock for all processes, because it decides which writers live.
    `version` is text. Different contents of a key have different versions. Equal contents may have equal ones.
    """

    key: str
    nbytes: int
    modified: float
    version: str


class KeyValues(Protocol):
    """Bytes by key. Several threads and processes call at once.

    A key is all text after ``scheme://``, such as ``gpt/step-1/a.json``. Treering repeats no failed call. Any error but
    those named here means that the outcome is unknown: `write` may raise it after it has written.
    """

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
        replaces: raises `FileExistsError` unless the key has a value with this version.
        """
        ...

    def delete(self, key: str) -> None:
        """Removes a value, if it exists."""
        ...


class KeyValueStore(ObjectStore):
    """A `Store` whose bytes are in a `KeyValues`. It writes, renews leases and recovers as it does in a bucket."""

    sharing = None  # A copy would travel through this process.

    def __init__(self, values: KeyValues):
        super().__init__()
        self.values = values

    def _make_bucket(self, url: str) -> Bucket:
        return _ValuesBucket(url, self.values)


class _ValuesBucket(Bucket):
    """Sends the requests of a `Bucket` to a `KeyValues`. Keys there begin with the host of the URL."""

    def __init__(self, url: str, values: KeyValues):
        super().__init__(url, values)
        self.can_copy = False
        self._values, self._place = values, url.partition("://")[2]

    def head(self, key: str) -> ObjectMeta | None:
        with self.translate_errors(key, "stat"):
            found = self._values.stat(self._full(key))
            return None if found is None else self._meta(key, "stat", found)

    def _bytes(
        self, key: str, begin: int, end: int, version: Version | None, into: memoryview = _NO_BYTES
    ) -> tuple[Any, ObjectMeta]:
        try:
            with self.translate_errors(key, "read", FileNotFoundError):
                answer: Any = self._values.read(self._full(key), begin, end)
        except FileNotFoundError:
            raise missing(self.url, key) from None
        came, value = answer if isinstance(answer, tuple) and len(answer) == 2 else (b"", answer)
        found = self._meta(key, "read", value)
        if version is not None and version != found.version:
            raise ChangedError(17, "replaced", f"{self.url}/{key}")
        if len(came) != (size := max(min(end, found.nbytes) - begin, 0)):
            raise self._wrong(key, f"expected `read` to return {size} bytes, found {len(came)}")
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
        condition = None if replaces is None or overwrite else replaces[0]
        try:
            with self.translate_errors(key, "write", FileExistsError):
                value = self._values.write(self._full(key), bytes(data), exclusive=exclusive, replaces=condition)
        except FileExistsError:
            raise ChangedError(17, "exists, or was replaced", f"{self.url}/{key}") from None
        return self._meta(key, "write", value).version

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

    def list_at_most(self, key: str, limit: int | None) -> "list[ObjectMeta] | None":
        with self.translate_errors(key, "list"):
            listed = self._values.list(self._full(f"{key}/" if key else ""))
            first = itertools.islice(listed, None if limit is None else limit + 1)
            found = [self._meta(key, "list", one) for one in first]
        return None if limit is not None and len(found) > limit else found

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with contextlib.suppress(FileNotFoundError), self.translate_errors(key, "delete", FileNotFoundError):
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
    def translate_errors(
        self, key: str, method: str = "write", expected: type[OSError] = RequestError
    ) -> Iterator[None]:
        """Wraps a call of a method, which may raise the `expected` error.

        An error of the system with a number keeps its kind and gets the path. All others become `RequestError`: also an
        absent file of the store itself, which must not count as an absent value.
        """
        try:
            yield
        except (TreeringError, expected):
            raise
        except Exception as error:
            unanswered = isinstance(error, ConnectionError | TimeoutError | FileNotFoundError)
            if isinstance(error, OSError) and error.errno is not None and not unanswered:
                if error.filename is None:
                    error.filename = f"{self.url}/{key}"
                raise
            raise self._wrong(key, f"`{method}` raised {type(error).__name__}: {error}") from error

    def _full(self, key: str) -> str:
        return f"{self._place}/{key}"

    def _meta(self, key: str, method: str, value: Any) -> ObjectMeta:
        """Returns the value that a method has returned for a key. Raises `RequestError` for anything else."""
        if not isinstance(value, Value) or not isinstance(value.version, str):
            wanted = f"expected `{method}` to return {_RETURNED[method]}, whose version is text"
            raise self._wrong(key, f"{wanted}, found {value!r:.100}")
        return ObjectMeta(relative_key(self._place, value.key), value.nbytes, value.modified, (value.version, None))

    def _wrong(self, key: str, problem: str) -> RequestError:
        return RequestError(
            f"{self.url}/{key}: the store did not answer as it should: {problem}; try again, or correct "
            f"{type(self._values).__name__}: Treering repeats no call of its methods"
        )
