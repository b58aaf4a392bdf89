"""Reads two folders in different stores as one: chosen files from the local store, all others from the remote store."""

import posixpath
from collections.abc import Callable
from contextlib import AbstractContextManager

from .store import Blob, Stat, Store


class LocalFirstStore:
    """Reads files below `local` if `is_local_name` chooses their names and they exist; reads all others below `remote`.

    It has only those methods of `stores.store.Store` that read.
    """

    def __init__(
        self, local_store: Store, local: str, remote_store: Store, remote: str, is_local_name: Callable[[str], bool]
    ):
        self._local_store, self._local, self._remote_store, self._remote = local_store, local, remote_store, remote
        self._is_local_name = is_local_name
        self.has_folders, self.has_locks = remote_store.has_folders, remote_store.has_locks
        self.object_bytes = remote_store.object_bytes

    def stat(self, path: str) -> Stat | None:
        found = self._local_store.stat(path) if self._is_local_file(path) else None
        return found or self._remote_store.stat(self._remote_path(path))

    def list(self, path: str) -> "list[str]":
        return self._remote_store.list(self._remote_path(path))

    def open(self, path: str, *, expected: int = 0, into: memoryview | None = None) -> Blob:
        if self._is_local_file(path):
            try:
                return self._local_store.open(path)
            except FileNotFoundError:  # another host's disk has it
                pass
        return self._remote_store.open(self._remote_path(path), expected=expected, into=into)

    def glance(self, path: str) -> AbstractContextManager[None]:
        return self._remote_store.glance(self._remote_path(path))

    def is_local(self, path: str) -> bool:
        return False  # some of its files are remote

    def is_link(self, path: str) -> bool:
        return self._remote_store.is_link(self._remote_path(path))

    def real_path(self, path: str) -> str:
        return self._remote_store.real_path(self._remote_path(path))

    def _is_local_file(self, path: str) -> bool:
        return self._is_local_name(posixpath.basename(path))

    def _remote_path(self, path: str) -> str:
        inner = posixpath.relpath(path, self._local)
        return self._remote if inner == "." else posixpath.join(self._remote, inner)
