"""Sends requests to one bucket through obstore. Raises errors as a file system does, also for incomplete answers."""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from ..._threads.forks import UnforkableLibrary
from ...errors import RequestError, UnsupportedError
from ..buffers import aligned, copy
from ..temporary_names import clock_probe_sibling
from .request_errors import BROKEN, BUSY, EMPTY, ChangedError, ConflictError, failure, missing, translate_errors

_ATTEMPTS = 4  # per request; obstore itself repeats requests that were not answered
_PAUSE_SECONDS = 0.2  # before the second attempt; doubled before each further one
_CLOCK_SECONDS = 600  # for which one reading of the server's clock is used
_MAX_QUICK_BYTES = 64 << 10  # requests with at most so many bytes use the client with the short timeout
MAX_UNCOPIED_BYTES = 1 << 20  # an answer of at most so many bytes is not copied to aligned memory
_NO_BYTES = memoryview(b"")

T = TypeVar("T")
Version = tuple[str | None, str | None]  # the ETag, and the version number in stores that have one


def join_key(folder: str, name: str) -> str:
    """Returns the key or URL of a name in a folder."""
    return f"{folder}/{name}" if folder and name else folder or name


def relative_key(folder: str, key: str) -> str:
    """Returns the name within a folder of an object below it."""
    return key[len(folder) + 1 :] if folder else key


def now() -> float:
    """Returns seconds of a clock that also runs while the machine is suspended, where the system has one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class ObjectMeta(NamedTuple):
    """An object: its key, size in bytes, time in seconds since the epoch by the server's clock, and version."""

    key: str
    nbytes: int
    modified: float
    version: Version

    def is_same(self, other: "ObjectMeta") -> bool:
        """Returns True if two answers describe the same object, or equal ones.

        Listings lack version numbers, and have fractions of seconds that other answers lack.
        """
        (tag, number), (other_tag, other_number) = self.version, other.version
        if self.nbytes != other.nbytes or tag != other_tag:
            return False
        if number and other_number:
            return number == other_number
        strong = tag is not None and not tag.startswith("W/")
        return strong or self.modified == other.modified


class Bucket:
    """Requests to one bucket. All paths in it begin with `url`; `client` is a store object of obstore.

    quick: a client with a shorter timeout, for requests with few bytes.
    """

    def __init__(self, url: str, client: Any, quick: Any = None, *, conditional: bool = True):
        self.url, self.client, self._quick_client = url, client, quick or client
        self.conditional = conditional  # requests have conditions, such as If-Match
        self._is_verified = False  # a test has shown that the server obeys conditions and returns stored bytes
        self.is_read_verified = False  # a test has shown that it returns stored bytes; see `round_trip`
        self.can_copy = True  # False if the server cannot, or once it has failed to; see `upload.copy_version`
        self._clock: tuple[float, float] | None = None  # the server's time, and the local time of that reading

    def head(self, key: str) -> ObjectMeta | None:
        """Returns the object of a key; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return _object_meta(self._retried(key, lambda: self._obstore.head(self._quick_client, key)))
        return None

    def get_prefix(self, key: str, nbytes: int, into: memoryview = _NO_BYTES) -> tuple[Any, ObjectMeta]:
        """Returns a buffer with the first bytes of an object, and the object. It has all bytes if there are fewer.

        Many bytes come in new memory that the caller may write to. If the object has `nbytes` bytes, the last ones are
        written to `into` instead of the buffer. Raises `FileNotFoundError`.
        """
        try:
            return self._bytes(key, 0, nbytes, None, into)
        except RequestError as error:
            if error._reason != EMPTY:
                raise
            found = self.head(key)
            if found is None:
                raise missing(self.url, key) from None
            return b"", found

    def read_into(self, target: memoryview, key: str, begin: int, expected: ObjectMeta) -> None:
        """Fills a buffer with bytes of an object, from `begin` on.

        Raises `ChangedError` unless it is the expected object.
        """
        _, found = self._bytes(key, begin, begin + len(target), expected.version, target)
        if not found.is_same(expected):
            raise ChangedError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.url}/{key}")

    def _bytes(
        self, key: str, begin: int, end: int, version: Version | None, into: memoryview = _NO_BYTES
    ) -> tuple[Any, ObjectMeta]:
        client = self._quick_client if end - begin <= _MAX_QUICK_BYTES else self.client
        options: dict[str, Any] = {"range": (begin, end)}
        if version and version[0] and not version[0].startswith("W/"):  # in HTTP, a weak ETag never matches If-Match
            options["if_match"] = version[0]

        def read() -> tuple[Any, ObjectMeta]:
            got = self._obstore.get(client, key, options=options)
            found = _object_meta(got.meta)
            size = min(end, found.nbytes) - begin
            elsewhere = into if end <= found.nbytes else _NO_BYTES
            came = memoryview(got.bytes())  # Reading it in chunks would need less memory, but a sixth more time.
            if len(came) != size:
                raise failure(f"{self.url}/{key}: expected {size} bytes, found {len(came)}", BROKEN)
            if size <= MAX_UNCOPIED_BYTES and not elsewhere:
                return came, found
            own = size - len(elsewhere)
            data = aligned(own)[:own] if own else _NO_BYTES
            for target, source in ((data, came[:own]), (elsewhere, came[own:])):
                if target:
                    copy(target, source)
            return data, found

        return self._retried(key, read)

    def _retried(self, key: str, ask: Callable[[], T]) -> T:
        """Returns the answer to a request that may be repeated, once it is complete."""
        for attempt in range(_ATTEMPTS):
            try:
                with self.translate_errors(key):
                    return ask()
            except (RequestError, ConflictError) as error:
                if isinstance(error, RequestError) and error._reason not in (BROKEN, BUSY):
                    raise
                if attempt == _ATTEMPTS - 1:
                    if isinstance(error, RequestError):
                        raise
                    raise RequestError(
                        f"{self.url}/{key}: the store keeps answering that another request for it is in progress; try "
                        "again later"
                    ) from None
                time.sleep(_PAUSE_SECONDS * 2**attempt)
        raise AssertionError

    def put(self, key: str, data: Any, *, replaces: Version | None = None, overwrite: bool = False) -> Version:
        """Puts an object: a new one, or over the version that it `replaces`, or over any with `overwrite`.

        Raises `ChangedError` if another version is in place. An object with exactly these bytes is a success: after a
        lost answer, the client sends the request again and finds its own object.
        """
        mode: Any = "overwrite" if overwrite else "create" if replaces is None else _mode(replaces)
        if not self.conditional and not overwrite:
            self.check_unchanged(key, replaces)
            mode = "overwrite"
        client = self._quick_client if memoryview(data).nbytes <= _MAX_QUICK_BYTES else self.client
        for attempt in range(_ATTEMPTS):
            try:
                with self.translate_errors(key):
                    return _version(self._obstore.put(client, key, data, mode=mode, use_multipart=False))
            except RequestError as error:
                if error._reason != BUSY or attempt == _ATTEMPTS - 1:
                    raise
            except ChangedError as error:
                if found := self.find_same(key, data):
                    return found.version
                # A request without a condition fails like this only because another request is in progress.
                conflict = overwrite or isinstance(error, ConflictError)
                if not conflict or attempt == _ATTEMPTS - 1:
                    raise
            time.sleep(_PAUSE_SECONDS * 2**attempt)
        raise AssertionError

    def find_same(self, key: str, data: Any) -> ObjectMeta | None:
        """Returns the object of a key if it has exactly these bytes, at least one."""
        data = memoryview(data).cast("B")
        if not len(data):
            return None
        with contextlib.suppress(FileNotFoundError):
            there, found = self.get_prefix(key, len(data) + 1)
            return found if bytes(there) == data else None
        return None

    def check_unchanged(self, key: str, replaces: Version | None) -> ObjectMeta | None:
        """Returns the object of a key.

        Raises `ChangedError` unless it has the version `replaces`; None stands for no object.
        """
        found = self.head(key)
        if (found and found.version) == replaces:
            return found
        raise ChangedError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.url}/{key}")

    def list(self, key: str) -> tuple[list[ObjectMeta], list[str]]:
        """Returns the objects one level below a key, and the keys of the folders there."""
        found = self._retried(key, lambda: self._obstore.list_with_delimiter(self._quick_client, prefix=key or None))
        folders = list(found["common_prefixes"])
        objects = [_object_meta(one) for one in found["objects"] if one["path"] != key]
        return [one for one in objects if one.nbytes or one.key not in folders], folders

    def list_all(self, key: str) -> "list[ObjectMeta]":
        """Returns all objects below a key, sorted by name."""
        return sorted(self.list_at_most(key, None) or ())

    def list_at_most(self, key: str, limit: int | None) -> "list[ObjectMeta] | None":
        """Returns all objects below a key; None if there are more than `limit`."""

        def ask() -> list[ObjectMeta] | None:
            found: list[ObjectMeta] = []
            for page in self._obstore.list(self.client, prefix=key or None):
                found += [_object_meta(one) for one in page if one["path"] != key]
                if limit is not None and len(found) > limit:
                    return None
            above = (
                {key for one in found for key in _parent_keys(one.key)} if any(not one.nbytes for one in found) else ()
            )
            return [one for one in found if one.nbytes or one.key not in above]

        return self._retried(key, ask)

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects. Missing objects are ignored."""
        if keys:
            chosen = list(keys) if len(keys) > 1 else keys[0]
            try:
                self._retried(keys[0], lambda: self._obstore.delete(self._quick_client, chosen))
            except FileNotFoundError:  # Some servers end a bulk request at a missing object: delete one by one.
                for key in keys if len(keys) > 1 else ():
                    self.delete([key])

    def copy(self, key: str, other: str) -> None:
        """Copies an object within the server."""
        self._retried(key, lambda: self._obstore.copy(self.client, key, other))

    def writer(self, key: str, part_bytes: int, parts: int) -> Any:
        """Returns a context manager that uploads an object in parts, `parts` of them at a time.

        An error aborts the upload.
        """
        with self.translate_errors(key):
            return self._obstore.open_writer(self.client, key, buffer_size=part_bytes, max_concurrency=parts)

    def check_conditions(self, key: str) -> None:
        """Raises `UnsupportedError` unless the server obeys conditions, which it tests on an existing object."""
        refused = [self._is_put_refused(key, replaces) for replaces in (None, ('"treering"', "1"))]
        if not all(refused):
            raise UnsupportedError(
                f"{self.url}: expected a store that refuses to create an object that exists (If-None-Match) and to "
                "replace one that has changed (If-Match), found one that does not: two jobs could replace each other's "
                "checkpoints and neither would know; save elsewhere, or pass a store that is registered with "
                "conditional=False if nothing else ever writes there"
            )

    def _is_put_refused(self, key: str, replaces: Version | None) -> bool:
        mode: Any = "create" if replaces is None else _mode(replaces)
        data = os.urandom(8)
        try:
            self._retried(key, lambda: self._obstore.put(self._quick_client, key, data, mode=mode, use_multipart=False))
        except ChangedError:
            return True
        return False

    def age(self, found: ObjectMeta, neighbor: str) -> float:
        """Returns the seconds since an object was written, by the server's clock.

        A new object next to `neighbor` shows the time.
        """
        for _ in range(_ATTEMPTS):
            if self._clock is not None and now() - self._clock[1] <= _CLOCK_SECONDS:
                return self._clock[0] + (now() - self._clock[1]) - found.modified
            self._read_clock(neighbor)
        raise RequestError(f"{self.url}/{neighbor}: the server's clock cannot be read from an object next to it")

    def _read_clock(self, neighbor: str) -> None:
        """Puts an object and reads the server's clock from its time.

        Reads nothing if another process has removed the object.
        """
        probe = clock_probe_sibling(neighbor)
        try:
            self.put(probe, b"-", overwrite=True)
            here = now()  # Read after the put: an age may come out too small, but a living writer never looks dead.
            if seen := self.head(probe):
                self._clock = (seen.modified, here)
        finally:
            self.delete([probe])

    @property
    def _obstore(self) -> Any:
        import obstore

        return obstore

    def translate_errors(self, key: str) -> contextlib.AbstractContextManager[None]:
        """Wraps a request. Raises `FileNotFoundError`, `ChangedError`, and `RequestError` for all that went wrong."""
        _OBSTORE.check()
        return translate_errors(self.url, key)


_OBSTORE = UnforkableLibrary("buckets")


def _parent_keys(key: str) -> Iterator[str]:
    """Yields the keys that some programs treat as folders of this one. They put empty objects there."""
    while key := key.rpartition("/")[0]:
        yield key


def _object_meta(meta: Any) -> ObjectMeta:
    return ObjectMeta(meta["path"], meta["size"], meta["last_modified"].timestamp(), _version(meta))


def _version(answer: Any) -> Version:
    """Returns the version of an object, the same for every kind of request.

    Azure's listings give the ETag without quotes, so they are added.
    """
    tag = answer["e_tag"]
    return (f'"{tag}"' if tag and '"' not in tag else tag), answer["version"]


def _mode(version: Version) -> dict[str, str]:
    names = {"e_tag": version[0], "version": version[1]}
    return {name: value for name, value in names.items() if value}
