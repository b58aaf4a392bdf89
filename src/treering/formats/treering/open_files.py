"""Opens the array files of a checkpoint, each when it is first needed."""

import contextlib
import posixpath
import threading
from collections.abc import Iterable, Sequence
from typing import NoReturn

from ..._threads.forks import free_in_children
from ...errors import CorruptError
from ...stores import file_io
from ...stores.file_io import opened, read_file
from ...stores.read_errors import ReplacedError
from ...stores.store import Store
from . import manifest
from .array_file import ArrayFile
from .manifest_fields import File
from .schema import MANIFEST


class OpenFiles:
    """The array files of a checkpoint, by their number in the manifest. An open file outlives a delete.

    `identity` is the checksum of the manifest, and `manifest_bytes` its size. `opened` has the open files.
    """

    def __init__(self, store: Store, path: str, listed: Sequence[File], identity: str, manifest_bytes: int):
        self.listed = listed
        self.opened: dict[int, ArrayFile] = {}
        self._store, self._path = store, path
        self._identity, self._manifest_bytes = identity, manifest_bytes
        # Reentrant: a signal handler may read while its thread holds the lock.
        self._open_lock = free_in_children(threading.RLock())
        self._is_present = False  # True once all array files are known to be present

    def get(self, number: int) -> ArrayFile:
        """Returns an array file, and opens it at the first call."""
        if found := self.opened.get(number):
            return found
        if self._store.object_bytes is not None:  # Without the lock, several objects can be opened at a time.
            return self.opened.setdefault(number, self.open(number))
        with self._open_lock:
            if number not in self.opened:
                self.opened[number] = self.open(number)
            return self.opened[number]

    def open(self, number: int, expected: int = 0, into: memoryview | None = None) -> ArrayFile:
        """Opens an array file without adding it to `opened`. For `expected` and `into` see `Store.open`.

        Raises `UnsupportedError` if it requires features that this release lacks. Raises `ReplacedError` if it is
        missing because the checkpoint was deleted or replaced, and `CorruptError` if it is missing otherwise.
        """
        listed = self.listed[number]
        if listed.requires:
            raise manifest.requiring(posixpath.join(self._path, listed.name), listed.requires)
        try:
            return ArrayFile(self._store, self._path, listed, expected, into)
        except ReplacedError:
            raise
        except FileNotFoundError:
            self._raise_missing(listed.name)

    def open_files(self, numbers: Iterable[int] | None = None) -> None:
        """Opens array files, by default all, so that they can be read after a delete. Does nothing in a bucket."""
        if self._store.object_bytes is not None:
            return
        for number in range(len(self.listed)) if numbers is None else numbers:
            if not self.listed[number].requires:
                self.get(number)

    def close(self) -> None:
        """Closes all files. Each is opened again when it is needed, and mapped memory stays."""
        with self._open_lock:
            self.opened.clear()

    def can_mmap(self, requested: bool | None) -> bool:
        """Returns True if arrays are returned as views of the mapped files, which take no memory."""
        if self._store.object_bytes is not None:
            return False  # Known without opening an object, which would be a request.
        known = next((n for n, file in enumerate(self.listed) if not file.requires), None)
        return known is None or self.get(known).can_mmap(requested)  # One answers for all: they share a directory.

    def check_present(self) -> None:
        """Raises `CorruptError` unless every array file is present in its full size. Open files were checked before."""
        if self._is_present:
            return
        unopened = [file for number, file in enumerate(self.listed) if number not in self.opened]
        with self._store.glance(self._path) if len(unopened) > 1 else contextlib.nullcontext():
            for file in unopened:
                self._check_present(file)
        self._is_present = True

    def _check_present(self, file: File) -> None:
        path = posixpath.join(self._path, file.name)
        found = self._store.stat(path)
        if found is not None and found.nbytes == file.size:
            return
        size = self._current_size(file.name)  # A cached listing may be older than the manifest.
        if size != file.size:
            file_io.check_all_fetched(self._store, path)
            problem = "it is cut short" if size < file.size else "it has been changed"
            raise CorruptError(f"{path}: expected {file.size} bytes, found {size}; {problem}")

    def _current_size(self, name: str) -> int:
        try:
            with opened(self._store, posixpath.join(self._path, name), expected=1) as blob:
                return blob.size
        except FileNotFoundError:
            self._raise_missing(name)

    def _raise_missing(self, name: str) -> NoReturn:
        """Raises `ReplacedError` if the checkpoint was deleted or replaced, else `CorruptError`."""
        try:
            path = posixpath.join(self._path, MANIFEST)
            now = manifest.xxh3(read_file(self._store, path, expected=self._manifest_bytes))
        except (FileNotFoundError, NotADirectoryError):
            raise ReplacedError(f"{self._path}: the checkpoint was deleted while it was open") from None
        if now != self._identity:
            raise ReplacedError(f"{self._path}: the checkpoint was replaced while it was open; open it again") from None
        raise CorruptError(f"{posixpath.join(self._path, name)}: expected an array file, found nothing") from None
