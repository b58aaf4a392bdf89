"""A bucket in memory and in simulated time, which carries out one request at a time.

It is a double, because no real server can be stopped between any two requests a hundred thousand times. The objects are
in obstore's memory store, which obeys conditions. The simulated times are put into its answers.
"""

import datetime
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import obstore
import obstore.store
import xxhash

OUTCOMES = ("lost", "unanswered", "repeated", "late", "killed before", "killed after")  # late: repeated at the end
EXPIRES_SECONDS = 90.0  # the age at which a lease expires
_NAMES = re.compile(r"(?<=[-.])[0-9a-f]{6}(?=[-.]|$)|(?<=kept-)[0-9a-f]{6}|[0-9]{20}")
_DRAWN = re.compile(
    rb'(?<="xxh3":")[0-9a-f]{16}(?="}\n)|(?<=-)[0-9a-f]{6}(?=-)|(?<="created":")[^"]*'
    rb'|(?<="(?:since|token)":")[^"]*|(?<="beat":")[^"]*|(?<="process":)[0-9]+|^[0-9a-f]{32}$'
)
_ARRAYS = re.compile(rb'"name":"(arrays-[^"]*)"')


class Answer(NamedTuple):
    """The outcome of a request: a result, or the name and text of an error, and the time after it."""

    result: Any
    error: tuple[str, str] | None
    clock: float


class Server:
    """The requests, by their names in obstore. `clock` has the simulated seconds since the epoch."""

    def __init__(self) -> None:
        self.memory = obstore.store.MemoryStore()
        self.clock = 1.7e9
        self._modified: dict[str, float] = {}
        self._contents: dict[str, int] = {}  # hashes of the objects' contents without random parts
        self._named: dict[str, list[str]] = {}  # by manifest: the keys of the array objects that it names

    def ask(self, name: str, args: Sequence[Any], options: dict[str, Any]) -> Answer:
        """Carries out a request of a job."""
        try:
            result = getattr(self, f"_{name}")(*args, **options)
            return Answer(result, None, self.clock)
        except (obstore.exceptions.BaseError, FileNotFoundError) as error:
            return Answer(None, (type(error).__name__, str(error)), self.clock)

    def contents(self) -> int:
        """Returns a hash that two contents share if they differ only in random parts."""
        found = sorted(
            (
                _NAMES.sub("*", key),
                content,
                key.endswith("writer.lock") and self._is_old(key),
                [self._contents.get(named) for named in self._named.get(key, ())],
            )
            for key, content in self._contents.items()
        )
        return xxhash.xxh3_64_intdigest(repr(found).encode())

    def adopt(self) -> None:
        """Records objects that were put directly into the memory store."""
        for page in obstore.list(self.memory):
            for one in page:
                self._note(one["path"], bytes(obstore.get(self.memory, one["path"]).bytes()))

    def clear(self) -> None:
        """Removes all objects. Version numbers continue, because the library recognizes objects by them."""
        obstore.delete(self.memory, list(self._modified))
        self._modified.clear()
        self._contents.clear()
        self._named.clear()

    def _is_old(self, key: str) -> bool:
        return self.clock - self._modified[key] > EXPIRES_SECONDS

    def _head(self, key: str) -> dict[str, Any]:
        return self._timed(obstore.head(self.memory, key))

    def _get(self, key: str, *, options: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        got = obstore.get(self.memory, key, options=options)  # pyright: ignore[reportArgumentType]
        return self._timed(got.meta), bytes(got.bytes())

    def _put(self, key: str, data: bytes, *, mode: Any, use_multipart: bool) -> Any:
        result = obstore.put(self.memory, key, data, mode=mode, use_multipart=use_multipart)
        self._note(key, data)
        return result

    def _list(self, *, prefix: str | None) -> list[Any]:
        return [[self._timed(one) for one in page] for page in obstore.list(self.memory, prefix=prefix)]

    def _list_with_delimiter(self, *, prefix: str | None) -> dict[str, Any]:
        found = obstore.list_with_delimiter(self.memory, prefix=prefix)
        objects = [self._timed(one) for one in found["objects"]]
        return {"common_prefixes": list(found["common_prefixes"]), "objects": objects}

    def _delete(self, keys: str | list[str]) -> None:
        try:
            obstore.delete(self.memory, keys)
        finally:
            for key in [keys] if isinstance(keys, str) else keys:
                self._modified.pop(key, None)
                self._contents.pop(key, None)
                self._named.pop(key, None)

    def _copy(self, key: str, other: str) -> None:
        obstore.copy(self.memory, key, other)
        self._note(other, bytes(obstore.get(self.memory, other).bytes()))

    def _note(self, key: str, data: bytes) -> None:
        self._modified[key] = self.clock
        self._contents[key] = xxhash.xxh3_64_intdigest(_DRAWN.sub(b"*", data))
        if key.endswith("treering.json"):
            folder = key.rpartition("/")[0]
            self._named[key] = [f"{folder}/{name.decode()}" for name in _ARRAYS.findall(data)]

    def _timed(self, meta: Any) -> dict[str, Any]:
        modified = datetime.datetime.fromtimestamp(self._modified[meta["path"]], datetime.UTC)
        return {**meta, "last_modified": modified}
