"""Requests to one bucket, by way of obstore: their errors as a file system raises them, short answers as errors."""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from ...errors import RequestError, UnsupportedError
from ..buffers import aligned, copy
from ..temporary_names import clock_beside
from .request_errors import BROKEN, BUSY, EMPTY, ChangedError, ConflictError, failure, missing, translate_errors

_ATTEMPTS = 4  # at reading bytes; obstore itself tries requests again that were not answered
_PAUSE_SECONDS = 0.2  # before the second attempt; doubled before each further one
_CLOCK_SECONDS = 600  # for which a look at the server's clock counts
_QUICK_BYTES = 64 << 10
_SMALL_BYTES = 1 << 20  # bytes of an answer, so many or fewer of which are left where they came
_NOTHING = memoryview(b"")

T = TypeVar("T")
Version = tuple[str | None, str | None]  # ETag, and the version of those stores that count them


def now() -> float:
    """Seconds that go on while the machine is suspended, where the system can tell."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Found(NamedTuple):
    """An object: its key, size in bytes, time in seconds since the epoch by the server's clock, and version."""

    key: str
    nbytes: int
    modified: float
    version: Version

    def is_same(self, other: "Found") -> bool:
        """Whether two answers are about one object, or equal ones.

        Lists have no numbers of versions, and fractions of seconds that other answers lack.
        """
        (tag, number), (other_tag, other_number) = self.version, other.version
        if self.nbytes != other.nbytes or tag != other_tag:
            return False
        if number and other_number:
            return number == other_number
        strong = tag is not None and not tag.startswith("W/")
        return strong or self.modified == other.modified


class Bucket:
    """The requests to one bucket. `url` is what the paths in it begin with; `client` is a store of obstore's.

    `quick` is another for what has few bytes, and should not wait as long for an answer.
    """

    def __init__(self, url: str, client: Any, quick: Any = None, *, conditional: bool = True):
        self.url, self.client, self._quick = url, client, quick or client
        self.conditional = conditional  # whether the server is asked to keep to conditions
        self._honours = False  # the server was seen to do so, and to give back what was put; see `round_trip`
        self.is_read_back = False  # it was seen to do the latter
        self._clock: tuple[float, float] | None = None  # the server's time, and the time here when it was asked

    def head(self, key: str) -> Found | None:
        """The object of a key; None when there is none."""
        with contextlib.suppress(FileNotFoundError):
            return _found(self._repeated(key, lambda: self._obstore.head(self._quick, key)))
        return None

    def beginning(self, key: str, nbytes: int, into: memoryview = _NOTHING) -> tuple[Any, Found]:
        """The object of a key and a buffer of its first bytes, all of them where it has fewer.

        Many come in memory of their own, which may be written. The last of them come `into` other memory, and are not
        in that buffer, if the object has as many. Raises `FileNotFoundError`.
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

    def read_into(self, target: memoryview, key: str, begin: int, expected: Found) -> None:
        """Fills a buffer with bytes of an object, from `begin` on. Raises `ChangedError` for another than expected."""
        _, found = self._bytes(key, begin, begin + len(target), expected.version, target)
        if not found.is_same(expected):
            raise ChangedError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.url}/{key}")

    def _bytes(
        self, key: str, begin: int, end: int, version: Version | None, into: memoryview = _NOTHING
    ) -> tuple[Any, Found]:
        client = self._quick if end - begin <= _QUICK_BYTES else self.client
        options: dict[str, Any] = {"range": (begin, end)}
        if version and version[0] and not version[0].startswith("W/"):  # weak ones fit nothing by the rules of HTTP
            options["if_match"] = version[0]

        def read() -> tuple[Any, Found]:
            got = self._obstore.get(client, key, options=options)
            found = _found(got.meta)
            size = min(end, found.nbytes) - begin
            elsewhere = into if end <= found.nbytes else _NOTHING
            came = memoryview(got.bytes())  # taking it chunk by chunk needs less memory, and a sixth more time
            if len(came) != size:
                raise failure(f"{self.url}/{key}: expected {size} bytes, found {len(came)}", BROKEN)
            if size <= _SMALL_BYTES and not elsewhere:
                return came, found
            own = size - len(elsewhere)
            data = aligned(own)[:own] if own else _NOTHING
            for target, source in ((data, came[:own]), (elsewhere, came[own:])):
                if target:
                    copy(target, source)
            return data, found

        return self._repeated(key, read)

    def _repeated(self, key: str, ask: Callable[[], T]) -> T:
        """The answer to a request that may be made again, until it comes whole."""
        for attempt in range(_ATTEMPTS):
            try:
                with self.asked(key):
                    return ask()
            except (RequestError, ConflictError) as error:
                if isinstance(error, RequestError) and error._reason not in (BROKEN, BUSY):
                    raise
                if attempt == _ATTEMPTS - 1:
                    if isinstance(error, RequestError):
                        raise
                    raise RequestError(
                        f"{self.url}/{key}: the store answers again and again that another request about it is under "
                        "way; try again later"
                    ) from None
                time.sleep(_PAUSE_SECONDS * 2**attempt)
        raise AssertionError

    def put(self, key: str, data: Any, *, replaces: Version | None = None, overwrite: bool = False) -> Version:
        """Puts an object: a new one, or over the one that it replaces, or over whatever is there.

        Raises `ChangedError` when that is not so, unless the object that is there is this very one: an answer that was
        lost makes the client ask again.
        """
        mode: Any = "overwrite" if overwrite else "create" if replaces is None else _mode(replaces)
        if not self.conditional and not overwrite:
            self.check_unchanged(key, replaces)
            mode = "overwrite"
        client = self._quick if memoryview(data).nbytes <= _QUICK_BYTES else self.client
        for attempt in range(_ATTEMPTS):
            try:
                with self.asked(key):
                    return _version(self._obstore.put(client, key, data, mode=mode, use_multipart=False))
            except RequestError as error:
                if error._reason != BUSY or attempt == _ATTEMPTS - 1:
                    raise
            except ChangedError as error:
                if found := self.same(key, data):
                    return found.version
                conflict = overwrite or isinstance(error, ConflictError)  # without a condition it can be nothing else
                if not conflict or attempt == _ATTEMPTS - 1:
                    raise
            time.sleep(_PAUSE_SECONDS * 2**attempt)
        raise AssertionError

    def same(self, key: str, data: Any) -> Found | None:
        """The object of a key if it has exactly these bytes, of which there are some."""
        data = memoryview(data).cast("B")
        if not len(data):
            return None
        with contextlib.suppress(FileNotFoundError):
            there, found = self.beginning(key, len(data) + 1)
            return found if bytes(there) == data else None
        return None

    def check_unchanged(self, key: str, replaces: Version | None) -> Found | None:
        """What is there. Raises `ChangedError` unless it is what is to be replaced, or nothing when that is None."""
        found = self.head(key)
        if (found and found.version) == replaces:
            return found
        raise ChangedError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.url}/{key}")

    def list(self, key: str) -> tuple[list[Found], list[str]]:
        """The objects whose names are a key, a slash and one more name, and the keys of those below which there are."""
        found = self._repeated(key, lambda: self._obstore.list_with_delimiter(self._quick, prefix=key or None))
        folders = list(found["common_prefixes"])
        objects = [_found(one) for one in found["objects"] if one["path"] != key]
        return [one for one in objects if one.nbytes or one.key not in folders], folders

    def list_all(self, key: str) -> "list[Found]":
        """All objects below a key, in the order of their names."""
        return sorted(self.list_up_to(key, None) or ())

    def list_up_to(self, key: str, most: int | None) -> "list[Found] | None":
        """All objects below a key; None where there are more than so many."""

        def ask() -> list[Found] | None:
            found: list[Found] = []
            for page in self._obstore.list(self.client, prefix=key or None):
                found += [_found(one) for one in page if one["path"] != key]
                if most is not None and len(found) > most:
                    return None
            above = {key for one in found for key in _above(one.key)} if any(not one.nbytes for one in found) else ()
            return [one for one in found if one.nbytes or one.key not in above]

        return self._repeated(key, ask)

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; those that are not there are none."""
        if keys:
            chosen = list(keys) if len(keys) > 1 else keys[0]
            try:
                self._repeated(keys[0], lambda: self._obstore.delete(self._quick, chosen))
            except FileNotFoundError:  # where a missing one ends the request, the others are removed one by one
                for key in keys if len(keys) > 1 else ():
                    self.delete([key])

    def copy(self, key: str, other: str) -> None:
        """Copies an object within the server."""
        self._repeated(key, lambda: self._obstore.copy(self.client, key, other))

    def writer(self, key: str, part_bytes: int, parts: int) -> Any:
        """An upload in parts, so many of which are in flight; a context manager that gives it up after an error."""
        with self.asked(key):
            return self._obstore.open_writer(self.client, key, buffer_size=part_bytes, max_concurrency=parts)

    def check_conditions(self, key: str) -> None:
        """Raises `UnsupportedError` unless the server keeps to conditions, tried on an object that is there."""
        refused = [self._refuses(key, replaces) for replaces in (None, ('"treering"', "1"))]
        if not all(refused):
            raise UnsupportedError(
                f"{self.url}: expected a store that refuses to create what is there (If-None-Match) and to replace "
                "what has changed (If-Match), found one that does not: two jobs could replace each other's checkpoints "
                "and neither would know; save elsewhere, or pass a store that is registered with conditional=False if "
                "nothing else ever writes there"
            )

    def _refuses(self, key: str, replaces: Version | None) -> bool:
        mode: Any = "create" if replaces is None else _mode(replaces)
        data = os.urandom(8)
        try:
            self._repeated(key, lambda: self._obstore.put(self._quick, key, data, mode=mode, use_multipart=False))
        except ChangedError:
            return True
        return False

    def age(self, found: Found, beside: str) -> float:
        """The seconds since an object was written, by the server's clock; it is read off an object beside a key."""
        for _ in range(_ATTEMPTS):
            if self._clock is not None and now() - self._clock[1] <= _CLOCK_SECONDS:
                return self._clock[0] + (now() - self._clock[1]) - found.modified
            self._ask_clock(beside)
        raise RequestError(f"{self.url}/{beside}: the server's clock cannot be read off an object beside it")

    def _ask_clock(self, beside: str) -> None:
        """Reads the server's clock off an object that was just put, unless another process has removed that."""
        probe = clock_beside(beside)
        try:
            self.put(probe, b"-", overwrite=True)
            here = now()  # afterwards: what is old is rather taken for younger than it is
            if seen := self.head(probe):
                self._clock = (seen.modified, here)
        finally:
            self.delete([probe])

    @property
    def _obstore(self) -> Any:
        import obstore

        return obstore

    def asked(self, key: str) -> contextlib.AbstractContextManager[None]:
        """Wraps a request. Raises `FileNotFoundError`, `ChangedError`, and `RequestError` for all that went wrong."""
        _check_process()
        return translate_errors(self.url, key)


_process: int | None = None  # that has made the first request


def _check_process() -> None:
    """Raises `UnsupportedError` in a forked child, which would wait for ever for threads that only its parent has."""
    global _process
    _process = _process or os.getpid()
    if _process != os.getpid():
        raise UnsupportedError(
            "buckets cannot be used in a process that was forked from one that has used them: begin it with "
            "multiprocessing's method 'spawn', or read there from a local copy"
        )


def _above(key: str) -> Iterator[str]:
    """The keys that others would take for the folders of one; some programs put empty objects there."""
    while key := key.rpartition("/")[0]:
        yield key


def _found(meta: Any) -> Found:
    return Found(meta["path"], meta["size"], meta["last_modified"].timestamp(), _version(meta))


def _version(answer: Any) -> Version:
    """The same for the same object whatever was asked: Azure's lists give the tag without its quotes."""
    tag = answer["e_tag"]
    return (f'"{tag}"' if tag and '"' not in tag else tag), answer["version"]


def _mode(version: Version) -> dict[str, str]:
    names = {"e_tag": version[0], "version": version[1]}
    return {name: value for name, value in names.items() if value}
