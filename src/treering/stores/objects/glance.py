"""What one look has shown of a bucket, or several have: who asks the same again for a moment gets the same answer."""

from collections.abc import Sequence
from typing import Any

from .bucket import Bucket, Found

_MOST_BEGINNINGS = 16  # that are remembered, each of 1 MiB at most


class Glance:
    """The objects below a key, all of which were `found`; None where they are too many to list at once, or cannot be.

    Then they are listed level by level, as they are asked for; what was asked about single objects is remembered.
    """

    def __init__(self, bucket: Bucket, key: str, found: Sequence[Found] | None):
        self.is_whole = found is not None
        self._bucket, self.key = bucket, key
        self._levels: dict[str, tuple[list[Found], list[str]]] = {}  # see `Bucket.list`
        self._objects = {one.key: one for one in found or ()}  # of all levels that are known
        self._folders: set[str] = set()  # likewise
        self._asked: dict[str, Found | None] = {}
        self._beginnings: dict[str, tuple[Any, Found]] = {}
        for one in found or ():
            folder = one.key.rpartition("/")[0]
            is_new = folder not in self._levels
            self._level(folder)[0].append(one)
            while is_new and len(folder) > len(key):
                above = folder.rpartition("/")[0]
                is_new = above not in self._levels
                self._level(above)[1].append(folder)
                folder = above

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
        return self._levels.get(key, ([], []))

    def _is_known(self, key: str) -> bool:
        """Whether it is known what is below a key: it was listed, or what is around it has no such folder."""
        if self.is_whole or key in self._levels:
            return True
        return key != self.key and key not in self._folders and self._is_known(key.rpartition("/")[0])

    def head(self, key: str) -> Found | None:
        """See `Bucket.head`."""
        if key != self.key and self._is_known(key.rpartition("/")[0]):
            return self._objects.get(key)
        if key not in self._asked:
            self._asked[key] = self._bucket.head(key)
        return self._asked[key]

    def beginning(self, key: str, nbytes: int) -> tuple[Any, Found]:
        """See `Bucket.beginning`; what is remembered is not to be written."""
        if key not in self._beginnings:
            data, found = self._bucket.beginning(key, nbytes)
            if len(self._beginnings) == _MOST_BEGINNINGS:
                del self._beginnings[next(iter(self._beginnings))]
            self._beginnings[key] = memoryview(data).toreadonly(), found
            self._asked[key] = found
        return self._beginnings[key]
