"""Counts the bytes that files take on the disk. Steps share files of unchanged arrays by hard links."""

import posixpath
from collections.abc import Hashable, Iterable, Sequence

from ..stores.store import Store


class DiskUsage:
    """Adds up the sizes of files. A file that several steps share by hard links counts once, where it is met first.

    closed: the paths that this process may not read.
    """

    def __init__(self, store: Store):
        self.closed: list[str] = []
        self._store = store
        self._counted: set[Hashable] = set()

    def count(self, path: str) -> int:
        """Returns the bytes of a file, or of all files in a directory, that are not counted yet."""
        store = self._store
        try:
            found = store.stat(path)
            if found is not None and found.is_file:
                return found.nbytes if self._is_new(found.version) else 0
            if (found is not None and not found.is_folder) or store.is_link(path):
                return 0
            names = store.list(path)
        except PermissionError:
            self.closed.append(path)
            return 0
        return sum(self.count(posixpath.join(path, name)) for name in names)

    def _is_new(self, version: Hashable) -> bool:
        if self._store.sharing != "links":  # Elsewhere equal versions are equal contents, not one file.
            return True
        is_new = version not in self._counted
        self._counted.add(version)
        return is_new


def freed_bytes(store: Store, going: Sequence[str], staying: Iterable[str]) -> int | None:
    """Returns the bytes that deleting `going` frees: without the files that `staying` shares.

    Returns None if a part may not be read, and where files are never shared: in buckets each size takes a request.
    """
    if store.sharing != "links":
        return None
    usage = DiskUsage(store)
    for path in staying:
        usage.count(path)
    nbytes = sum(usage.count(path) for path in going)
    return None if usage.closed else nbytes


def size_or_none(store: Store, path: str) -> int | None:
    """Returns the bytes of a file or directory; None if this process may not read a part."""
    usage = DiskUsage(store)
    nbytes = usage.count(path)
    return None if usage.closed else nbytes
