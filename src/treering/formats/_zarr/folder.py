"""A folder of zarr arrays, as plain files or as an OCDBT database, through TensorStore.

TensorStore reads and writes files itself, without the `Disk` that all other code uses. It blocks forever on pipes
and believes the sizes of files. So this module looks at the files first, where it can.
"""

import contextlib
import os
import posixpath
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from ..._threads.forks import UnforkableLibrary
from ...errors import CorruptError, UnsafeError
from ...stores import file_io
from ...stores.file_io import is_folder, read_file
from ...stores.read_errors import reading
from ...stores.store import Stat, Store
from ...stores.tensorstore_memory import decode_error
from .._shared.reader import attempt, attempts
from . import metadata as zarr_metadata

_FAILURES = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNKNOWN", "INTERNAL", "ABORTED", "CANCELLED")

_CODE = re.compile(r"(?:os_error_code='|\[OS error )(\d+)")
Driver = Literal["zarr", "zarr3"]
IN_FLIGHT = 128 << 20  # bytes of chunks that are read or written at a time; a larger chunk is processed alone
MAX_METADATA_BYTES = 16 << 20  # bytes; a larger metadata file of an array is refused
CONTEXT = {
    "cache_pool#nodes": {"total_bytes_limit": 64 << 20},
    "file_io_concurrency": {"limit": 32},
    "file_io_sync": False,
}
# As Orbax does it: small values are stored in the tree itself, and the tree in one node, as there is one writer.
DATABASE_OPTIONS: dict[str, Any] = {
    "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"},
    "assume_config": True,
    "target_data_file_size": 1 << 31,
    "value_data_prefix": "d/v",  # separate from the nodes, which TensorStore reads again while it writes
}
# For a database written in portions: each portion rewrites the nodes that it changes, and all stay in memory.
IN_PORTIONS = {**DATABASE_OPTIONS, "config": {**DATABASE_OPTIONS["config"], "max_decoded_node_bytes": 1 << 15}}
DATABASE = "manifest.ocdbt"
DATABASE_PARTS = re.compile(r"manifest\.ocdbt|d|ocdbt\.process_\d+")  # files and folders of a database
# Its threads are missing in a forked child, which it ends.
TENSORSTORE = UnforkableLibrary("zarr arrays")


class PendingReads:
    """Pending futures, and the bytes of memory that they take together, at most `limit`."""

    def __init__(self, store: Store, limit: int):
        self._store = store
        self._limit, self._bytes_in_flight = limit, 0
        self._futures: deque[tuple[Any, int, str]] = deque()

    def make_room(self, nbytes: int) -> None:
        """Waits for the oldest futures until `nbytes` more are within the limit, or until none is pending."""
        while self._futures and self._bytes_in_flight + nbytes > self._limit:
            self._end_one()

    def add(self, future: Any, nbytes: int, path: str) -> None:
        self._bytes_in_flight += nbytes
        self._futures.append((future, nbytes, path))

    def end(self) -> None:
        """Waits for all futures. Raises the first error."""
        while self._futures:
            self._end_one()

    @contextlib.contextmanager
    def ended_on_errors(self) -> Iterator[None]:
        """Waits for all futures if the `with` block raises.

        The caller then removes the files, and a future that is still pending could write one again.
        """
        try:
            yield
        except BaseException:
            self.drain()
            raise

    def drain(self) -> None:
        """Waits for all futures and ignores their errors."""
        while self._futures:
            with contextlib.suppress(Exception):
                self._futures.popleft()[0].result()

    def _end_one(self) -> None:
        future, nbytes, path = self._futures.popleft()
        with errors(self._store, path):
            future.result()
        self._bytes_in_flight -= nbytes


@contextlib.contextmanager
def errors(store: Store, path: str) -> Iterator[None]:
    """Translates TensorStore's errors: into `OSError` if the file system has failed, into `CorruptError` if not."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        if ours := decode_error(str(error), path):
            raise ours from None
        text = str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0]
        if text.startswith(_FAILURES):
            code = _CODE.search(text)
            raise (OSError(int(code[1]), text, path) if code else OSError(f"{path}: {text}")) from None
        # A git-lfs pointer that TensorStore has read as data explains the error better. If looking for one fails, the
        # error of TensorStore is the better one.
        with contextlib.suppress(OSError):
            # Below the file of a database, `path` is not a folder of the store.
            place = path if is_folder(store, path, links=True) else os.path.dirname(path)
            file_io.check_all_fetched(store, place)
        raise CorruptError(f"{path}: {text}") from None


class Folder:
    """Opens a folder of zarr arrays: plain files or, with `ocdbt`, one OCDBT database.

    `options` are those of a database that is written; None opens the folder for reading.
    """

    def __init__(
        self, store: Store, path: str, *, ocdbt: bool, options: Mapping[str, Any] | None = None, context: Any = None
    ):
        import tensorstore as ts

        TENSORSTORE.check()
        self.store, self.path, self.ocdbt = store, path, ocdbt
        if ocdbt and options is None:
            self._check_database()
        self.context = context or ts.Context(CONTEXT)
        spec = store.tensorstore(path, self.context, writes=options is not None)
        if ocdbt:
            spec = {"driver": "ocdbt", "base": spec, "cache_pool": "cache_pool#nodes", **(options or {})}
        with errors(store, path):
            self.keys = ts.KvStore.open(spec, context=self.context).result()
        self.cached_array: tuple[Any, Any] | None = None  # the array last read in parts of chunks, opened

    def _check_database(self) -> None:
        """Raises `CorruptError` for files that TensorStore would block on, read completely or take for empty ones."""
        manifest = posixpath.join(self.path, DATABASE)
        if (size := check_file(manifest, stat(self.store, manifest)).nbytes) > MAX_METADATA_BYTES:
            raise UnsafeError(f"{manifest}: {size} bytes, more than the manifest of a database can have")
        names = filter(DATABASE_PARTS.fullmatch, self.store.list(self.path))  # the folder may hold other things, too
        places = [posixpath.join(self.path, name) for name in names]
        while places:
            there = stat(self.store, place := places.pop())
            if there is None or not there.is_folder:
                check_file(place, there)
            elif not self.store.is_link(place):  # a folder behind a link is read without this check
                places += [posixpath.join(place, name) for name in self.store.list(place)]

    def reads_again(self, name: str) -> bool:
        """Returns True if TensorStore reads a file again while it writes: any file of a database except its chunks."""
        return self.ocdbt and not name.startswith(DATABASE_OPTIONS["value_data_prefix"])

    def list(self, prefix: str = "") -> "list[str]":
        """Lists the keys of a database that start with a prefix. Raises `CorruptError` if it cannot be read."""
        import tensorstore as ts

        TENSORSTORE.check()
        with errors(self.store, self.path):
            start = prefix.encode()
            between = ts.KvStore.KeyRange(start, start + b"\xff" if start else b"")
            found = self.keys.list(between).result()
        return sorted(key.decode(errors="surrogateescape") for key in found)

    def metadata(self, names: Sequence[str], driver: Driver) -> "list[bytes | CorruptError]":
        """Reads the metadata files of arrays, all at once; an error stands for each that cannot be read."""
        paths = [posixpath.join(self.path, metadata_key(name, driver)) for name in names]
        if not self.ocdbt:
            files = [attempt(lambda path=path: self._check_metadata_file(path)) for path in paths]
            return attempts(self.store, files, lambda path: read_file(self.store, path))
        TENSORSTORE.check()
        pending = [self.keys.read(metadata_key(name, driver)) for name in names]
        return [attempt(lambda one=one: self._value(*one)) for one in zip(paths, pending, strict=True)]

    def _value(self, path: str, pending: Any) -> bytes:
        with errors(self.store, self.path):
            found = pending.result()
        if found.state != "value":
            raise CorruptError(f"{path}: expected an array's metadata, found nothing")
        return found.value

    def _check_metadata_file(self, path: str) -> str:
        there = self.store.stat(path)
        if there is None:
            raise CorruptError(f"{path}: expected an array's metadata, found nothing")
        if there.nbytes > MAX_METADATA_BYTES:
            raise UnsafeError(f"{path}: {there.nbytes} bytes, more than an array's metadata can have")
        folder, within = map(self.store.real_path, (self.path, os.path.dirname(path)))
        if not posixpath.join(within, "").startswith(posixpath.join(folder, "")):
            raise UnsafeError(f"{path}: expected an array in {self.path}, found a link to a place outside")
        return path


def part_of_database(path: str, index: int) -> str:
    """Returns the folder in which a process writes its part of a database; see `DATABASE_PARTS`."""
    return posixpath.join(path, f"ocdbt.process_{index}")


def key_prefix(name: str) -> str:
    """Returns the prefix of the keys of an array."""
    return name if not name or name.endswith("/") else f"{name}/"


def metadata_key(name: str, driver: Driver) -> str:
    """Returns the key of an array's metadata."""
    return key_prefix(name) + zarr_metadata.FILES[driver]


def stat(store: Store, path: str) -> Stat | None:
    with reading(path):
        return store.stat(path)


def check_file(path: str, there: Stat | None) -> Stat:
    if there is None:
        raise CorruptError(f"{path}: expected a chunk, found nothing")
    if not there.is_file:
        raise CorruptError(f"{path}: expected a file, found a folder, a pipe or a device")
    return there
