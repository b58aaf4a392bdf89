"""All objects below a key, as one look has shown them."""

from collections.abc import Sequence

from .bucket import Bucket, Found


class Glance:
    """The objects below a key, by their keys."""

    def __init__(self, bucket: Bucket, key: str, found: Sequence[Found]):
        self.key, self.objects = key, {one.key: one for one in found}
        self._bucket = bucket
        self._files: dict[str, list[Found]] = {}
        self._folders: dict[str, set[str]] = {}
        for one in found:
            folder = one.key.rpartition("/")[0]
            self._files.setdefault(folder, []).append(one)
            while len(folder) > len(key):
                above = folder.rpartition("/")[0]
                self._folders.setdefault(above, set()).add(folder)
                folder = above

    def covers(self, bucket: Bucket, key: str) -> bool:
        """Whether everything below a key was looked at."""
        return bucket is self._bucket and (key == self.key or not self.key or key.startswith(self.key + "/"))

    def list(self, key: str) -> tuple[list[Found], list[str]]:
        """See `Bucket.list`."""
        return self._files.get(key, []), sorted(self._folders.get(key, ()))
