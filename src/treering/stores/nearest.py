"""Reads two folders in different stores as one: chosen files from the local store, all others from the remote store."""

import posixpath
from collections.abc import Callable
from contextlib import AbstractContextManager

from .store import Blob, Stat, Store


class Nearest:
    """Reads files below `near` if `is_near` chooses their names and they exist; reads all others below `far`.

    It has only those methods of `stores.store.Store` that read.
    """

    def __init__(self, near_store: Store, near: str, far_store: Store, far: str, is_near: Callable[[str], bool]):
        self._near_store, self._near, self._far_store, self._far = near_store, near, far_store, far
        self._is_near = is_near
        self.has_folders, self.has_locks = far_store.has_folders, far_store.has_locks
        self.object_bytes = far_store.object_bytes

    def stat(self, path: str) -> Stat | None:
        found = self._near_store.stat(path) if self._chosen(path) else None
        return found or self._far_store.stat(self._there(path))

    def list(self, path: str) -> "list[str]":
        return self._far_store.list(self._there(path))

    def open(self, path: str, *, expected: int = 0, into: memoryview | None = None) -> Blob:
        if self._chosen(path):
            try:
                return self._near_store.open(path)
            except FileNotFoundError:  # another host's disk has it
                pass
        return self._far_store.open(self._there(path), expected=expected, into=into)

    def glance(self, path: str) -> AbstractContextManager[None]:
        return self._far_store.glance(self._there(path))

    def is_local(self, path: str) -> bool:
        return False  # some of its files are remote

    def is_link(self, path: str) -> bool:
        return self._far_store.is_link(self._there(path))

    def real_path(self, path: str) -> str:
        return self._far_store.real_path(self._there(path))

    def _chosen(self, path: str) -> bool:
        return self._is_near(posixpath.basename(path))

    def _there(self, path: str) -> str:
        inner = posixpath.relpath(path, self._near)
        return self._far if inner == "." else posixpath.join(self._far, inner)
