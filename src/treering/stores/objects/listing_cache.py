"""Caches listings and heads of a bucket during one operation, so that repeated requests get the same answer."""

import threading
from collections.abc import Sequence
from typing import Any

from ..._threads.forks import free_in_children
from ..read_errors import ReplacedError
from .bucket import Bucket, ObjectMeta

_MAX_BEGINNING_BYTES = 16 << 20  # of the first bytes of objects in the cache, at most 1 MiB each


class ListingCache:
    """Answers requests about the objects below a key from one listing, for as long as a `Store.glance` block lasts.

    found: all objects below the key; None if they are too many to list at once, or the server cannot list. Then levels
        are listed on demand, and the answers about single objects are cached.
    """

    def __init__(self, bucket: Bucket, key: str, found: Sequence[ObjectMeta] | None):
        self.is_complete = found is not None
        self._bucket, self.key = bucket, key
        self._levels: dict[str, tuple[list[ObjectMeta], list[str]]] = {}  # see `Bucket.list`
        self._objects = {one.key: one for one in found or ()}  # of all listed levels
        self._folders: set[str] = set()  # of all listed levels
        self._heads: dict[str, ObjectMeta | None] = {}
        self._prefixes: dict[str, tuple[Any, ObjectMeta]] = {}
        self._prefix_bytes = 0
        self._lock = free_in_children(threading.RLock())
        for one in found or ():
            folder = _parent_key(one.key)
            is_new = folder not in self._levels
            self._ensure_level(folder)[0].append(one)
            while is_new and len(folder) > len(key):
                above = _parent_key(folder)
                is_new = above not in self._levels
                self._ensure_level(above)[1].append(folder)
                folder = above

    def _ensure_level(self, key: str) -> tuple[list[ObjectMeta], list[str]]:
        return self._levels.setdefault(key, ([], []))

    def covers(self, bucket: Bucket, key: str) -> bool:
        """Returns True if a key is the key of this cache, or below it."""
        return bucket is self._bucket and (key == self.key or not self.key or key.startswith(self.key + "/"))

    def list(self, key: str) -> tuple[list[ObjectMeta], list[str]]:
        """Returns what `Bucket.list` does."""
        if not self._is_listed(key):
            self._levels[key] = objects, folders = self._bucket.list(key)
            self._objects |= {one.key: one for one in objects}
            self._folders.update(folders)
        return self._levels.get(key, ([], []))

    def _is_listed(self, key: str) -> bool:
        """Returns True if the level below a key is known: it was listed, or a listed level above has no such folder."""
        if self.is_complete or key in self._levels:
            return True
        return key != self.key and key not in self._folders and self._is_listed(_parent_key(key))

    def head(self, key: str) -> ObjectMeta | None:
        """Returns what `Bucket.head` does."""
        if key != self.key and self._is_listed(_parent_key(key)):
            return self._objects.get(key)
        if key not in self._heads:
            self._heads[key] = self._bucket.head(key)
        return self._heads[key]

    def list_all(self, key: str) -> "list[ObjectMeta]":
        """Returns what `Bucket.list_all` does.

        Raises `ReplacedError` if levels that were listed before have changed.
        """
        before = {one.key: one for one in self._objects.values() if one.key.startswith(f"{key}/" if key else "")}
        if self.is_complete:
            return sorted(before.values())
        found = self._bucket.list_all(key)
        now = {one.key: one for one in found if one.nbytes and _parent_key(one.key) in self._levels}
        for name in now.keys() | {one.key for one in before.values() if one.nbytes}:
            if name not in now or name not in before or not now[name].is_same(before[name]):
                raise self._replaced_error(name)
        return found

    def get_prefix(self, key: str, nbytes: int) -> tuple[Any, ObjectMeta]:
        """Returns what `Bucket.get_prefix` does, in memory that must not be written.

        Raises `ReplacedError` if the object has changed since it was listed: old names must not be combined with new
        contents.
        """
        with self._lock:
            known = self._prefixes.get(key)
        if known is None:
            data, found = self._bucket.get_prefix(key, nbytes)
            self._check_listed(found)
            known = memoryview(data).toreadonly(), found
            with self._lock:
                if key not in self._prefixes:  # another thread may have read it meanwhile
                    self._prefixes[key] = known
                    self._prefix_bytes += len(known[0])
                while self._prefix_bytes > _MAX_BEGINNING_BYTES:
                    self._prefix_bytes -= len(self._prefixes.pop(next(iter(self._prefixes)))[0])
            self._heads[key] = found
        return known

    def _check_listed(self, found: ObjectMeta) -> None:
        around = _parent_key(found.key)
        if found.key == self.key or not self._is_listed(around):
            return
        listed = self._objects.get(found.key)
        if listed and (found.is_same(listed) or listed in self._bucket.list(around)[0]):
            return  # unchanged, or this store's listings state versions differently from its other answers
        raise self._replaced_error(found.key)

    def _replaced_error(self, key: str) -> ReplacedError:
        return ReplacedError(f"{self._bucket.url}/{key}: it was replaced while it was being opened; open it again")


def _parent_key(key: str) -> str:
    """Returns the key of the level that an object is in."""
    return key.rpartition("/")[0]
