"""Caches listings and heads of a bucket during one operation, so that repeated requests get the same answer."""

import threading
from collections.abc import Sequence
from typing import Any

from ..read_errors import ReplacedError
from .bucket import Bucket, Found

_MAX_BEGINNINGS = 16  # first bytes of objects in the cache, at most 1 MiB each


class Glance:
    """The objects below a key, all of which were `found`. None stands for too many to list at once, or for no listing.

    In that case, levels are listed on demand, and the answers about single objects are cached.
    """

    def __init__(self, bucket: Bucket, key: str, found: Sequence[Found] | None):
        self.is_whole = found is not None
        self._bucket, self.key = bucket, key
        self._levels: dict[str, tuple[list[Found], list[str]]] = {}  # see `Bucket.list`
        self._objects = {one.key: one for one in found or ()}  # of all listed levels
        self._folders: set[str] = set()  # of all listed levels
        self._asked: dict[str, Found | None] = {}
        self._beginnings: dict[str, tuple[Any, Found]] = {}
        self._lock = threading.RLock()
        for one in found or ():
            folder = _around(one.key)
            is_new = folder not in self._levels
            self._level(folder)[0].append(one)
            while is_new and len(folder) > len(key):
                above = _around(folder)
                is_new = above not in self._levels
                self._level(above)[1].append(folder)
                folder = above

    def _level(self, key: str) -> tuple[list[Found], list[str]]:
        return self._levels.setdefault(key, ([], []))

    def covers(self, bucket: Bucket, key: str) -> bool:
        """Returns True if a key is the key of this cache, or below it."""
        return bucket is self._bucket and (key == self.key or not self.key or key.startswith(self.key + "/"))

    def list(self, key: str) -> tuple[list[Found], list[str]]:
        """Returns what `Bucket.list` does."""
        if not self._is_known(key):
            self._levels[key] = objects, folders = self._bucket.list(key)
            self._objects |= {one.key: one for one in objects}
            self._folders.update(folders)
        return self._levels.get(key, ([], []))

    def _is_known(self, key: str) -> bool:
        """Returns True if the level below a key is known: it was listed, or a listed level above has no such folder."""
        if self.is_whole or key in self._levels:
            return True
        return key != self.key and key not in self._folders and self._is_known(_around(key))

    def head(self, key: str) -> Found | None:
        """Returns what `Bucket.head` does."""
        if key != self.key and self._is_known(_around(key)):
            return self._objects.get(key)
        if key not in self._asked:
            self._asked[key] = self._bucket.head(key)
        return self._asked[key]

    def all(self, key: str) -> "list[Found]":
        """Returns what `Bucket.list_all` does.

        Raises `ReplacedError` if levels that were listed before have changed.
        """
        before = {one.key: one for one in self._objects.values() if one.key.startswith(f"{key}/" if key else "")}
        if self.is_whole:
            return sorted(before.values())
        found = self._bucket.list_all(key)
        now = {one.key: one for one in found if one.nbytes and _around(one.key) in self._levels}
        for name in now.keys() | {one.key for one in before.values() if one.nbytes}:
            if name not in now or name not in before or not now[name].is_same(before[name]):
                raise self._replaced(name)
        return found

    def beginning(self, key: str, nbytes: int) -> tuple[Any, Found]:
        """Returns what `Bucket.beginning` does, in memory that must not be written.

        Raises `ReplacedError` if the object has changed since it was listed: old names must not be combined with new
        contents.
        """
        with self._lock:
            known = self._beginnings.get(key)
        if known is None:
            data, found = self._bucket.beginning(key, nbytes)
            self._check(found)
            known = memoryview(data).toreadonly(), found
            with self._lock:
                if len(self._beginnings) == _MAX_BEGINNINGS:
                    del self._beginnings[next(iter(self._beginnings))]
                self._beginnings[key] = known
            self._asked[key] = found
        return known

    def _check(self, found: Found) -> None:
        around = _around(found.key)
        if found.key == self.key or not self._is_known(around):
            return
        listed = self._objects.get(found.key)
        if listed and (found.is_same(listed) or listed in self._bucket.list(around)[0]):
            return  # unchanged, or this store's listings state versions differently from its other answers
        raise self._replaced(found.key)

    def _replaced(self, key: str) -> ReplacedError:
        return ReplacedError(f"{self._bucket.url}/{key}: it was replaced while it was being opened; open it again")


def _around(key: str) -> str:
    """Returns the key of the level that an object is in."""
    return key.rpartition("/")[0]
