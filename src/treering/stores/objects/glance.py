"""What one look has shown of a bucket, or several have: who asks the same again for a moment gets the same answer."""

import threading
from typing import Any

from ..read_errors import ReplacedError
from .bucket import Bucket, Found

HEAD_BYTES = 1 << 20  # bytes that come with opening: reading them takes no longer than asking does
_MOST_BEGINNINGS = 16  # that are remembered


class Glance:
    """The objects below a key: up to `most` are listed at once, more level by level as they are asked for; None: never.

    They are listed when that is needed first. Who begins by asking about one object is about to read it: its beginning
    is the answer, and if it is there, that may be all that is wanted. What was asked about one object is remembered.
    """

    def __init__(self, bucket: Bucket, key: str, most: int | None):
        self._bucket, self.key, self._most = bucket, key, most
        self._is_listed, self._is_whole = most is None, False
        self._levels: dict[str, tuple[list[Found], list[str]]] = {}  # see `Bucket.list`
        self._objects: dict[str, Found] = {}  # of all levels that are known
        self._folders: set[str] = set()  # likewise
        self._asked: dict[str, Found | None] = {}
        self._beginnings: dict[str, tuple[Any, Found]] = {}
        self._lock = threading.RLock()

    @property
    def is_whole(self) -> bool:
        """Whether all objects are known."""
        with self._lock:
            if not self._is_listed:
                self._look()
        return self._is_whole

    def _look(self) -> None:
        found = self._bucket.list_up_to(self.key, self._most)
        self._is_listed, self._is_whole = True, found is not None
        self._objects |= {one.key: one for one in found or ()}
        for one in found or ():
            folder = _around(one.key)
            is_new = folder not in self._levels
            self._level(folder)[0].append(one)
            while is_new and len(folder) > len(self.key):
                above = _around(folder)
                is_new = above not in self._levels
                self._level(above)[1].append(folder)
                folder = above
        self._check_asked()

    def _level(self, key: str) -> tuple[list[Found], list[str]]:
        return self._levels.setdefault(key, ([], []))

    def covers(self, bucket: Bucket, key: str) -> bool:
        """Whether a key is that of this glance, or below it."""
        return bucket is self._bucket and (key == self.key or not self.key or key.startswith(self.key + "/"))

    def list(self, key: str) -> tuple[list[Found], list[str]]:
        """See `Bucket.list`."""
        if not self._is_known(key):
            self._levels[key] = objects, folders = self._bucket.list(key)
            self._objects |= {one.key: one for one in objects}
            self._folders.update(folders)
            self._check_asked()
        return self._levels.get(key, ([], []))

    def _is_known(self, key: str) -> bool:
        """Whether it is known what is below a key: it was listed, or what is around it has no such folder."""
        if self.is_whole or key in self._levels:
            return True
        return key != self.key and key not in self._folders and self._is_known(_around(key))

    def head(self, key: str) -> Found | None:
        """See `Bucket.head`."""
        if not self._is_listed and not self._asked and _around(key) == self.key:
            found = self._begin(key)
            if found and not found.nbytes:
                del self._asked[key]  # where there are objects below it, it is taken for none
        if key not in self._asked:
            if key != self.key and self._is_known(_around(key)):
                return self._objects.get(key)
            if self._is_whole and not self._objects:  # it is a file, if anything
                self._begin(key)
            else:
                self._asked[key] = self._bucket.head(key)
        return self._asked[key]

    def _begin(self, key: str) -> Found | None:
        """Asks about one object that is about to be read."""
        try:
            return self.beginning(key, HEAD_BYTES)[1]
        except FileNotFoundError:
            self._asked[key] = None
            return None

    def all(self, key: str) -> "list[Found]":
        """See `Bucket.list_all`. Raises `ReplacedError` when levels that were listed before are others now."""
        is_whole = self.is_whole
        before = {one.key: one for one in self._objects.values() if one.key.startswith(f"{key}/" if key else "")}
        if is_whole:
            return sorted(before.values())
        found = self._bucket.list_all(key)
        now = {one.key: one for one in found if one.nbytes and _around(one.key) in self._levels}
        for name in now.keys() | {one.key for one in before.values() if one.nbytes}:
            if name not in now or name not in before or not now[name].is_same(before[name]):
                raise self._replaced(name)
        return found

    def beginning(self, key: str, nbytes: int) -> tuple[Any, Found]:
        """See `Bucket.beginning`; what is remembered is not to be written.

        Raises `ReplacedError` for another object than was listed: names from then do not belong to contents from now.
        """
        with self._lock:
            known = self._beginnings.get(key)
        if known is None:
            data, found = self._bucket.beginning(key, nbytes)
            self._check(found)
            known = memoryview(data).toreadonly(), found
            with self._lock:
                if len(self._beginnings) == _MOST_BEGINNINGS:
                    del self._beginnings[next(iter(self._beginnings))]
                self._beginnings[key] = known
            self._asked[key] = found
        return known

    def _check_asked(self) -> None:
        """Raises `ReplacedError` when what was asked about single objects is no longer so in a list."""
        for key, found in list(self._asked.items()):
            if found and found.nbytes:
                self._check(found)
            elif not found and key in self._objects:
                raise self._replaced(key)

    def _check(self, found: Found) -> None:
        around = _around(found.key)
        if found.key == self.key or not self._is_listed or not self._is_known(around):
            return
        listed = self._objects.get(found.key)
        if listed and (found.is_same(listed) or listed in self._bucket.list(around)[0]):
            return  # or lists of this store name versions otherwise than answers about one object
        raise self._replaced(found.key)

    def _replaced(self, key: str) -> ReplacedError:
        return ReplacedError(f"{self._bucket.url}/{key}: it was replaced while it was looked for; open it again")


def _around(key: str) -> str:
    """The key of the level that an object is in."""
    return key.rpartition("/")[0]
