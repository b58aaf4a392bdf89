"""Detects names that differ but lead to one folder, on file systems that ignore case or Unicode normalization."""

import posixpath
import unicodedata

from ...errors import UnsupportedError
from ...stores.store import Store


class Folders:
    """The names of arrays, each stored in a folder below `folder`, which becomes the checkpoint at `path`."""

    def __init__(self, store: Store, folder: str, path: str):
        self._store, self._folder, self._path = store, folder, path
        self._folders: dict[str, str] = {}  # the first name for each spelling without case and normalization

    def add(self, name: str) -> None:
        """Adds a name. Raises `UnsupportedError` if the file system treats its folder as that of another name.

        Only names that may collide are tried on the file system, because each trial makes a folder.
        """
        begin = ""
        for part in name.split("/"):
            begin = posixpath.join(begin, part)
            other = self._folders.setdefault(unicodedata.normalize("NFC", begin).casefold(), begin)
            if other != begin and self._is_one(other, begin):
                raise UnsupportedError(
                    f"{self._path}: expected a file system that tells upper from lower case, found one on which the "
                    f"keys {other!r} and {begin!r} are one folder; rename one of them with treering.rules.rename, or "
                    "save in the native format"
                )

    def _is_one(self, a: str, b: str) -> bool:
        self._store.make_folders(posixpath.join(self._folder, a), [])
        return self._store.stat(posixpath.join(self._folder, b)) is not None
