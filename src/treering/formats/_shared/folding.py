"""Different names that are the same on a file system that does not tell upper from lower case."""

import posixpath
import unicodedata

from ...errors import UnsupportedError
from ...stores.store import Store


class Folders:
    """The names of arrays that get folders below a folder, which becomes the checkpoint at a path."""

    def __init__(self, store: Store, folder: str, path: str):
        self._store, self._folder, self._path = store, folder, path
        self._known: dict[str, str] = {}  # each as it came first, by what the coarsest file system makes of it

    def add(self, name: str) -> None:
        """Adds a name. Raises `UnsupportedError` when the file system takes it, or a part of it, for another's."""
        begin = ""
        for part in name.split("/"):
            begin = posixpath.join(begin, part)
            other = self._known.setdefault(unicodedata.normalize("NFC", begin).casefold(), begin)
            if other != begin and self._is_one(other, begin):
                raise UnsupportedError(
                    f"{self._path}: expected a file system that tells upper from lower case, found one on which the "
                    f"keys {other!r} and {begin!r} are one folder; rename one of them with treering.rules.rename, or "
                    "save in the native format"
                )

    def _is_one(self, a: str, b: str) -> bool:
        self._store.make_folders(posixpath.join(self._folder, a), [])
        return self._store.stat(posixpath.join(self._folder, b)) is not None
