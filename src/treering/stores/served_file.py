"""Opens files for peers: only plain files in the folders directly below a root, and never through links."""

import contextlib
import os
from collections.abc import Iterator

from ..errors import UnsupportedError
from .directories import folder, opened
from .filesystem import Filesystem
from .store import Store


class ServedRoot:
    """A directory whose folders' files are served. Raises `UnsupportedError` if it is not on a file system."""

    def __init__(self, store: Store, path: str):
        if not isinstance(store, Filesystem):
            raise UnsupportedError(f"{path}: expected a directory of a file system, found another store")
        self._disk, self.path = store.disk, store.real_path(path)

    @contextlib.contextmanager
    def opened(self, folder_name: str, name: str) -> Iterator[int]:
        """Opens the file `name` in a folder for reading within a `with` block, and yields its descriptor.

        Each name is looked up in an open directory, so a link that is made meanwhile is not followed either.

        Raises `PermissionError` for names that are not plain, `NotADirectoryError` for a link to a folder,
        `CorruptError` for anything that is not a file, and the errors of opening.
        """
        if not (_is_plain(folder_name) and _is_plain(name)):
            raise PermissionError(f"{folder_name!r:.99}, {name!r:.99}: expected the names of a folder and its file")
        with (
            folder(self._disk, self.path) as outer,
            folder(self._disk, outer.entry(folder_name)) as inner,
            opened(self._disk, inner.entry(name)) as fd,
        ):
            yield fd


def _is_plain(name: str) -> bool:
    """Returns True for a name that can only be an entry of a directory, and is not hidden."""
    return bool(name) and not name.startswith(".") and os.path.basename(name) == name and "\0" not in name
