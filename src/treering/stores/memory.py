"""A store in memory, for tests: names and bytes without folders, like a bucket.

A name, a slash and more characters count as a file in a folder of that name. A folder without files does not exist.
"""

import contextlib
import errno
import itertools
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

from ..errors import CorruptError
from . import lease_registry
from .file_io import check_free
from .flat_folders import check_replaceable
from .ranges import Range
from .store import ABSENT, CheckNeighbors, Owned, Stat, Writer
from .temporary_names import temporary_sibling
from .tensorstore_memory import drain_memory, load_into_memory

_log = logging.getLogger("treering")
_version_numbers = itertools.count()


class _Object:
    """The bytes of one name. `in_use` is True while its writer lives, and keeps others from removing it."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.in_use = False
        self.touch()

    def touch(self) -> None:
        self.version, self.modified = next(_version_numbers), time.time()


class MemoryStore:
    """Bytes by name. `stores.store.Store` documents the methods."""

    has_folders = False
    has_locks = True
    object_bytes = None

    def __init__(self) -> None:
        self.objects: dict[str, _Object] = {}
        self.lock = threading.RLock()
        self.leases: weakref.WeakValueDictionary[str, _MemoryLease] = weakref.WeakValueDictionary()

    # Reading

    def stat(self, path: str) -> Stat | None:
        with self.lock:
            if found := self.objects.get(path):
                return Stat("file", len(found.data), found.modified, found.version)
            below = [one for name, one in self.objects.items() if name.startswith(_folder_prefix(path))]
        last = max(below, key=lambda one: one.version, default=None)
        return last and Stat("folder", 0, last.modified, (last.version, len(below)))

    def list(self, path: str) -> "list[str]":
        below = _folder_prefix(path)
        with self.lock:
            return sorted({name[len(below) :].partition("/")[0] for name in self.objects if name.startswith(below)})

    def open(self, path: str, *, expected: int = 0, into: memoryview | None = None) -> "_MemoryBlob":
        with self.lock:
            if path not in self.objects and self.stat(path):
                raise CorruptError(f"{path}: expected a file, found a folder")
            return _MemoryBlob(path, self._find(path).data)

    def glance(self, path: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_local(self, path: str) -> bool:
        return True

    def is_link(self, path: str) -> bool:
        return False

    def real_path(self, path: str) -> str:
        return path

    def tensorstore(self, path: str, context: Any, *, writes: bool = False) -> dict[str, Any]:
        below = _folder_prefix(path)
        with self.lock:
            found = [
                (name[len(below) :], bytes(one.data)) for name, one in self.objects.items() if name.startswith(below)
            ]
        return load_into_memory(path, context, found)

    def written_by_tensorstore(self, path: str, context: Any, which: Callable[[str], bool]) -> None:
        def put(name: str, data: bytes) -> None:
            one = _Object()  # A new object, because open blobs keep reading the old one.
            one.data += data
            with self.lock:
                self.objects[_folder_prefix(path) + name] = one

        drain_memory(path, context, which, put, 1)

    # Writing

    def create(self, path: str, *, visible: bool = False, expected: int = 0) -> "_MemorySink":
        with self.lock:
            if self.stat(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            one = self.objects[path] = _Object()
            return _MemorySink(self, path, one)

    def delete(self, path: str) -> None:
        with self.lock:
            self._find(path)
            del self.objects[path]

    def delete_all(self, path: str, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self.delete(_folder_prefix(path) + name)

    @contextlib.contextmanager
    def unused(self, path: str) -> "Iterator[Callable[[], None] | None]":
        with self.lock:
            yield None if self._find(path).in_use else lambda: self.delete(path)

    def make_folder(self, path: str) -> None:
        if self.stat(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def make_folders(self, path: str, made: "list[str]") -> None: ...

    def remove_folder(self, path: str) -> None:
        if self.stat(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)

    def settle(self, path: str) -> None: ...

    def move(self, old: str, new: str, *, last: str) -> None:
        with self.lock:
            if self.stat(new):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
            if not self.stat(old):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old)
            for name in [name for name in self.objects if name == old or name.startswith(_folder_prefix(old))]:
                self.objects[name].touch()
                self.objects[new + name[len(old) :]] = self.objects.pop(name)

    @contextlib.contextmanager
    def new_file(self, path: str, *, overwrite: bool) -> "Iterator[Writer]":
        check_free(self, path, overwrite=overwrite, folder=False)
        writer = _MemoryWriter()
        yield writer
        with self.lock:
            check_free(self, path, overwrite=overwrite, folder=False)
            writer.object.touch()
            self.objects[path] = writer.object

    @contextlib.contextmanager
    def new_folder(
        self,
        path: str,
        *,
        overwrite: bool,
        owned: Owned,
        names: Collection[str] = (),
        beside: CheckNeighbors | None = None,
    ) -> "Iterator[str]":
        check_free(self, path, overwrite=overwrite, folder=True)
        check_replaceable(self, path, owned, names, beside)
        with self.scratch_folder(path) as temporary:
            yield temporary
            with self.lock:
                check_free(self, path, overwrite=overwrite, folder=True)
                for name in check_replaceable(self, path, owned, names, beside):
                    self.objects.pop(_folder_prefix(path) + name, None)
                for name in [name for name in self.objects if name.startswith(_folder_prefix(temporary))]:
                    self.objects[path + name[len(temporary) :]] = self.objects.pop(name)

    @contextlib.contextmanager
    def scratch_folder(self, path: str) -> "Iterator[str]":
        temporary = temporary_sibling(path)
        try:
            yield temporary
        finally:
            with self.lock:
                for left in [left for left in self.objects if left.startswith(_folder_prefix(temporary))]:
                    del self.objects[left]

    def lease(self, run: str, busy: Callable[[], bool] = lambda: False) -> "_MemoryLease":
        return _MemoryLease(self, run, busy)

    def _find(self, path: str) -> _Object:
        if path not in self.objects:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self.objects[path]


class _MemoryBlob:
    """See `stores.store.Blob`."""

    local = has_holes = False
    readers, read_bytes = 4, 4 << 20

    def __init__(self, path: str, data: bytearray):
        self.path, self.size = path, len(data)
        self._data = data

    def read_into(self, target: memoryview, offset: int, *, anew: bool = False) -> None:
        target[:] = self.read(offset, len(target))

    def read(self, offset: int, nbytes: int) -> bytes:
        data = bytes(self._data[offset : offset + nbytes])
        if len(data) < nbytes or offset < 0:
            raise CorruptError(f"{self.path}: expected {offset + nbytes} bytes, found {self.size}; it is cut short")
        return data

    def read_up_to(self, nbytes: int) -> bytes:
        return bytes(self._data[:nbytes])

    def take(self, ranges: Sequence[Range]) -> list[memoryview] | None:
        return None

    def forget(self) -> None: ...

    def mapped(self, ranges: Sequence[Range]) -> mmap.mmap | None:
        return None

    def bring_in(self, mapped: mmap.mmap, begin: int, end: int) -> None: ...

    def bring_all_in(self, mapped: mmap.mmap, ranges: Iterable[Range]) -> None: ...

    def close(self) -> None: ...


class _MemorySink:
    """See `stores.store.Sink`."""

    def __init__(self, store: MemoryStore, path: str, one: _Object):
        self.path = path
        self._store, self._object = store, one
        one.in_use = True

    def preallocate(self, nbytes: int) -> None: ...

    def write(self, data: memoryview, offset: int) -> None:
        with self._store.lock:
            self._resize(max(len(self._object.data), offset + len(data)))
            self._object.data[offset : offset + len(data)] = data

    def finish(self, nbytes: int, *, read_only: bool = False) -> None:
        with self._store.lock:
            self._resize(nbytes)
            self._object.touch()

    def _resize(self, nbytes: int) -> None:
        data = self._object.data
        data.extend(bytes(max(nbytes - len(data), 0)))
        del data[nbytes:]

    def publish(self, path: str, *, overwrite: bool, version: Hashable | None = None) -> None:
        with self._store.lock:
            found = self._store.stat(path)
            seen = found.version if found else ABSENT
            if (found and not overwrite) or (overwrite and version not in (None, seen)):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self._object.touch()
            self._store.objects[path] = self._object
            if overwrite and path != self.path:
                self._store.objects.pop(self.path, None)

    def is_at(self, path: str) -> bool:
        return self._store.objects.get(path) is self._object

    def close(self) -> None:
        self._object.in_use = False


class _MemoryWriter:
    """See `stores.store.Writer`."""

    def __init__(self) -> None:
        self.object = _Object()

    @property
    def size(self) -> int:
        return len(self.object.data)

    def write(self, data: bytes | memoryview) -> None:
        self.object.data += memoryview(data).cast("B")


class _MemoryLease:
    """See `stores.store.Lease`."""

    def __init__(self, store: MemoryStore, run: str, busy: Callable[[], bool]):
        self.lost = False
        self._store, self._run, self._busy = store, run, busy

    def acquire(self) -> None:
        with self._store.lock:
            if self.lost:
                raise lease_registry.lost_error(self._run)
            holder = self._store.leases.get(self._run)
            if holder and holder is not self:
                if holder._busy():
                    raise lease_registry.busy_error(self._run)
                _log.warning("%s: acquired from another Checkpointer, which was not closed", self._run)
                holder.lost = True
            self._store.leases[self._run] = self

    def check_free(self) -> None:
        """Does nothing: no other process has this store."""

    def release(self) -> None:
        with self._store.lock:
            if self._store.leases.get(self._run) is self:
                del self._store.leases[self._run]


def _folder_prefix(path: str) -> str:
    """Returns the text that the names of a folder's files begin with."""
    return path.rstrip("/") + "/"
