"""The files that the viewer may read: those of one checkpoint or run, in any store."""

import os
import posixpath
from collections.abc import Iterator

from ... import formats, stores
from ...errors import NotFoundError, UnsupportedError
from ...stores.file_io import opened
from ...stores.store import Stat

_SUFFIXES = (".json", ".safetensors")  # the page reads no others, so no others are served
_FORMATS = ("treering", "safetensors")


class ServedFiles:
    """The files of a path that the page reads: in the path, and in the folders directly in it.

    Raises `NotFoundError` if nothing exists at the path, and `UnsupportedError` if the page could not show it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = stores.absolute(path)
        self._store = stores.get(self.path)
        found = self._store.stat(self.path)
        if found is None:
            raise NotFoundError(f"{self.path}: expected a checkpoint or a run, found nothing. Check the path")
        self._is_file = found.is_file
        self._check_shown()
        self._root = self._store.real_path(posixpath.dirname(self.path) if self._is_file else self.path)

    def _check_shown(self) -> None:
        with self._store.glance(self.path):
            if any(formats.get(name).refuses(self._store, self.path) is None for name in _FORMATS):
                return
            folders = [] if self._is_file else (posixpath.join(self.path, one) for one in self._store.list(self.path))
            if any(formats.get("treering").refuses(self._store, one) is None for one in folders):
                return
        raise UnsupportedError(
            f"{self.path}: expected a Treering checkpoint, a run of them, or safetensors files, found none; "
            "convert other formats with `treering convert`"
        )

    def names(self) -> list[str]:
        """Lists the files as paths below the root."""
        if self._is_file:
            return [posixpath.basename(self.path)]
        with self._store.glance(self.path):
            return list(self._names())

    def _names(self) -> Iterator[str]:
        for name in self._store.list(self._root):
            if name.endswith(_SUFFIXES):
                yield name
                continue
            found = self._store.stat(posixpath.join(self._root, name))
            if found and found.is_folder and self._inside(name):
                inner = self._store.list(posixpath.join(self._root, name))
                yield from (f"{name}/{one}" for one in inner if one.endswith(_SUFFIXES))

    def _inside(self, name: str) -> bool:
        """Returns True if a path is below the root, after links are followed."""
        real = self._store.real_path(posixpath.join(self._root, name))
        return real.startswith(self._root.rstrip("/") + "/")

    def find(self, name: str) -> Stat | None:
        """Returns the `Stat` of a file; None if the page may not read it, or if it does not exist."""
        parts = name.split("/")
        is_plain = len(parts) <= 2 and all(part not in ("", ".", "..") and "\0" not in part for part in parts)
        if not is_plain or "\\" in name or not name.endswith(_SUFFIXES):
            return None
        if self._is_file and name != posixpath.basename(self.path):
            return None
        found = self._store.stat(posixpath.join(self._root, name))
        return found if found and found.is_file and self._inside(name) else None

    def read(self, name: str, first: int, nbytes: int) -> bytes:
        """Returns bytes of a file that `find` has found."""
        with opened(self._store, posixpath.join(self._root, name)) as blob:
            return blob.read(first, nbytes)
