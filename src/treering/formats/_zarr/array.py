"""Zarr arrays, as plain files or in an OCDBT database, through TensorStore.

TensorStore does its own reading and writing, below the `Disk` that everything else goes through; all of that is here.
It fills in missing chunks unless it is told not to, believes sizes, and ends the process when there is no memory for
them; so sizes are checked first, against the files where that can be done.
"""

import contextlib
import math
import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, box_shape, slices
from ..._processes.calls import ALONE, Call
from ...errors import CorruptError, SaveError, UnsafeError, UnsupportedError
from ...stores import git_lfs
from ...stores.buffers import adoptable
from ...stores.nfs import look_anew, wait_until
from ...stores.read_errors import reading
from ...stores.store import Stat, Store
from ...stores.whole_files import files_in, opened, read_file
from .._shared.pending_reads import PendingReads, errors
from . import metadata as zarr_metadata
from .chunks import Chunks

Driver = Literal["zarr", "zarr3"]
IN_FLIGHT = 128 << 20  # bytes of chunks that are read or written at a time; a larger chunk passes alone
_MAX_KEPT_BYTES = 128 << 20  # bytes of decoded chunks kept of an array of which parts of chunks are read
_LARGE = 8 << 20  # bytes of a part of chunks from which on they are kept
_PROBED = 64 << 20  # bytes from which on it is asked first whether there is memory for them
_MAX_METADATA_BYTES = 16 << 20  # bytes of an array's metadata that can be meant
_FEW_CHUNKS = 4  # that are asked for one by one, where that takes a request to a store
_EACH = 4 << 10  # bytes that a chunk takes while it is read, besides its own
_CONTEXT = {
    "cache_pool#nodes": {"total_bytes_limit": 64 << 20},
    "file_io_concurrency": {"limit": 32},
    "file_io_sync": False,
}
# As Orbax has it: metadata of arrays lies in the tree itself, and the tree in one node, for there is one writer.
_DATABASE = {
    "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"},
    "assume_config": True,
    "target_data_file_size": 1 << 31,
    "value_data_prefix": "d/v",  # apart from the nodes, which are read again while it is written
}
DATABASE = "manifest.ocdbt"
DATABASE_PARTS = re.compile(r"manifest\.ocdbt|d|ocdbt\.process_\d+")  # files and folders of a database
_GZIP = {"id": "gzip", "level": 1}


class Folder:
    """A folder of zarr arrays: plain files or, with `ocdbt`, one OCDBT database, which may be given options."""

    def __init__(
        self, store: Store, path: str, *, ocdbt: bool, options: Mapping[str, Any] | None = None, context: Any = None
    ):
        import tensorstore as ts

        self.store, self.path, self.ocdbt = store, path, ocdbt
        if ocdbt and options is None:
            self._check_database()
        self.context = context or ts.Context(_CONTEXT)
        spec = store.tensorstore(path, self.context, writes=options is not None)
        if ocdbt:
            spec = {"driver": "ocdbt", "base": spec, "cache_pool": "cache_pool#nodes", **(options or {})}
        with errors(store, path):
            self.keys = ts.KvStore.open(spec, context=self.context).result()
        self.kept: tuple[Array, Any] | None = None  # the array of which parts of chunks were read last

    def _check_database(self) -> None:
        """Raises `CorruptError` for files that TensorStore would wait for for ever, read whole, or take for empty."""
        manifest = posixpath.join(self.path, DATABASE)
        if (size := _check_file(manifest, _stat(self.store, manifest)).nbytes) > _MAX_METADATA_BYTES:
            raise UnsafeError(f"{manifest}: {size} bytes, which cannot be meant as the manifest of a database")
        names = filter(DATABASE_PARTS.fullmatch, self.store.list(self.path))  # other things may lie beside it
        places = [posixpath.join(self.path, name) for name in names]
        while places:
            there = _stat(self.store, place := places.pop())
            if there is None or not there.is_folder:
                _check_file(place, there)
            elif not self.store.is_link(place):  # what a link to a folder leads to is read as it is
                places += [posixpath.join(place, name) for name in self.store.list(place)]

    def reads_again(self, name: str) -> bool:
        """Whether TensorStore reads a file again while it writes: all of a database, but for the chunks."""
        return self.ocdbt and not name.startswith(_DATABASE["value_data_prefix"])

    def list(self, prefix: str = "") -> "list[str]":
        """The keys of a database that start with a prefix. Raises `CorruptError` when it cannot be read."""
        import tensorstore as ts

        with errors(self.store, self.path):
            start = prefix.encode()
            between = ts.KvStore.KeyRange(start, start + b"\xff" if start else b"")
            found = self.keys.list(between).result()
        return sorted(key.decode(errors="surrogateescape") for key in found)

    def arrays(self, names: "Sequence[str]", driver: Driver, *, filled: bool = False) -> "list[Array]":
        """The arrays of these names; see `Array`. Raises the first `CorruptError`."""
        found: list[Array] = []
        for array in self.find(names, driver, filled=filled):
            if isinstance(array, CorruptError):
                raise array
            found.append(array)
        return found

    def find(self, names: "Sequence[str]", driver: Driver, *, filled: bool = False) -> "list[Array | CorruptError]":
        """The array of each name, or why there is none; the metadata of all is read at once."""
        pending = [self.keys.read(_about(name, driver)) if self.ocdbt else None for name in names]
        found: list[Array | CorruptError] = []
        for name, future in zip(names, pending, strict=True):
            try:
                found.append(Array(self, name, driver, self.metadata(name, driver, future), filled=filled))
            except UnsafeError:
                raise
            except CorruptError as error:
                found.append(error)
        return found

    def metadata(self, name: str, driver: Driver, future: Any = None) -> bytes:
        """The contents of an array's metadata file, which may be on their way already.

        Raises `CorruptError` where there is none.
        """
        key = _about(name, driver)
        path = posixpath.join(self.path, key)
        if not self.ocdbt:
            return self._file(path)
        with errors(self.store, self.path):
            found = (future or self.keys.read(key)).result()
        if found.state != "value":
            raise CorruptError(f"{path}: expected an array's metadata, found nothing")
        return found.value

    def _file(self, path: str) -> bytes:
        there = self.store.stat(path)
        if there is None:
            raise CorruptError(f"{path}: expected an array's metadata, found nothing")
        if there.nbytes > _MAX_METADATA_BYTES:
            raise UnsafeError(f"{path}: {there.nbytes} bytes, which cannot be meant as an array's metadata")
        folder, within = map(self.store.real_path, (self.path, os.path.dirname(path)))
        if not posixpath.join(within, "").startswith(posixpath.join(folder, "")):
            raise UnsafeError(f"{path}: expected an array in {self.path}, found a link that leads out of it")
        return read_file(self.store, path)


class Array:
    """A zarr array in a folder, given its metadata; see `Stored` in `formats._shared.reader`.

    Every chunk has to be there: a missing one is a `CorruptError` that names it. With `filled`, chunks that are left
    out are those of the fill value, as zarr 3 has it and JAX's own serializer does it.
    """

    def __init__(self, folder: Folder, name: str, driver: Driver, metadata: bytes, *, filled: bool = False):
        self.folder, self.name, self.filled = folder, name, filled
        self.driver: Driver = driver
        self.path = posixpath.join(folder.path, name)
        self._layout = zarr_metadata.parse(metadata, driver, self.path)
        self.shape, self.dtype = self._layout.shape, self._layout.dtype

    @property
    def cells(self) -> int:
        """The number of parts that are read at a time."""
        return math.prod(-(-n // cell) for n, cell in zip(self.shape, self._layout.cells, strict=True))

    def can_map(self) -> bool:
        return False

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        return read([(self, box)])[0]

    def room(self, box: Box) -> np.ndarray:
        """Memory for a box. Raises `UnsupportedError` when there is not enough for it, or for one chunk."""
        nbytes = math.prod(box_shape(box)) * self._layout.itemsize
        most = max(nbytes, self._layout.cell_bytes)
        try:
            if most >= _PROBED:
                np.empty(most, np.uint8)
            return adoptable(box_shape(box), dtypes.to_numpy(self.dtype))
        except (MemoryError, ValueError):
            raise UnsupportedError(f"{self.path}: {most} bytes at a time do not fit into memory") from None

    def open(self, box: Box) -> Any:
        """The array in TensorStore, after a look at the chunks that the box needs.

        Where large parts of chunks are read, the chunks are kept until another array is read, or this one's end.
        """
        import tensorstore as ts

        self._check_chunks(box)
        folder, kept = self.folder, self.folder.kept
        folder.kept = None
        keep = self._is_in_parts(box)
        if keep and kept and kept[0] is self:
            stored = kept[1]
        else:
            spec = {"driver": self.driver, "metadata": self._layout.spec, "fill_missing_data_reads": self.filled}
            context = folder.context
            if keep:
                spec["recheck_cached_data"] = "open"
                most = max(_MAX_KEPT_BYTES, self._layout.cell_bytes + (1 << 20))
                context = ts.Context({"cache_pool": {"total_bytes_limit": most}}, context)
            with errors(self.folder.store, self.path):
                kvstore = folder.keys / _below(self.name)
                stored = ts.open(spec, kvstore=kvstore, open=True, assume_metadata=True, context=context).result()
            if stored.dtype.numpy_dtype != dtypes.to_numpy(self.dtype) or stored.shape != self.shape:
                raise CorruptError(f"{self.path}: expected {self.dtype}{list(self.shape)}, found {stored.dtype.name}")
        if keep and any(stop != size for (_, stop), size in zip(box, self.shape, strict=True)):
            folder.kept = (self, stored)
        return stored

    def split(self, box: Box, limit: int) -> Iterator[tuple[Box, int]]:
        """Parts of a box, cut between chunks, and the bytes that each takes: at most `limit` unless it is one chunk."""
        stack = [box]
        while stack:
            part = stack.pop()
            firsts = [start // cell for (start, _), cell in zip(part, self._layout.cells, strict=True)]
            counts = [-(-stop // c) - n for (_, stop), c, n in zip(part, self._layout.cells, firsts, strict=True)]
            nbytes = math.prod(counts) * (self._layout.cell_bytes + _EACH)
            axis = next((axis for axis, count in enumerate(counts) if count > 1), None)
            if nbytes <= limit or axis is None:
                yield part, nbytes
                continue
            middle = (firsts[axis] + counts[axis] // 2) * self._layout.cells[axis]
            (start, stop), before, after = part[axis], part[:axis], part[axis + 1 :]
            stack += [(*before, (middle, stop), *after), (*before, (start, middle), *after)]

    def _is_in_parts(self, box: Box) -> bool:
        bounds = zip(box, self.shape, self._layout.cells, strict=True)
        cut = any(start % cell or (stop % cell and stop != size) for (start, stop), size, cell in bounds)
        return cut and math.prod(box_shape(box)) * self._layout.itemsize >= _LARGE

    def _check_chunks(self, box: Box) -> None:
        """Raises `CorruptError` for chunks of a box that cannot be what the metadata says, as far as files show it.

        TensorStore reports chunks that are missing in a database when it reads them.
        """
        chunks = self._layout.chunks
        axes = [range(start // c, -(-stop // c)) for (start, stop), c in zip(box, chunks, strict=True)]
        keys = (_below(self.name) + self._layout.key(index) for index in _indices(axes))
        if not self.folder.ocdbt:
            several = math.prod(map(len, axes)) > _FEW_CHUNKS
            with self.folder.store.glance(self.path) if several else contextlib.nullcontext():
                for key in keys:
                    self._check_file(posixpath.join(self.folder.path, key))
        elif self._layout.blosc:
            for key in keys:
                with errors(self.folder.store, self.path):
                    found = self.folder.keys.read(key).result()
                if found.state == "value":
                    self._check_blosc(found.value, key)

    def _check_file(self, path: str) -> None:
        nbytes = self._layout.chunk_bytes
        if self.filled and self.folder.store.stat(path) is None:
            return
        there = _check_file(path, _stat(self.folder.store, path))
        if self._layout.plain and there.nbytes != nbytes:
            git_lfs.check_all(self.folder.store, path)
            raise CorruptError(f"{path}: expected a chunk of {nbytes} bytes, found {there.nbytes}")
        if there.nbytes > 2 * nbytes + _MAX_METADATA_BYTES:
            raise UnsafeError(f"{path}: {there.nbytes} bytes, which cannot be a chunk of {nbytes}")
        if self._layout.blosc:
            with reading(path), opened(self.folder.store, path) as blob:
                head = blob.read_up_to(16)
                git_lfs.check_open(blob)
            self._check_blosc(head, path)

    def _check_blosc(self, head: bytes | bytearray, path: str) -> None:
        """Checks the size that a Blosc chunk claims, which Blosc would believe."""
        if int.from_bytes(head[4:8], "little") != self._layout.chunk_bytes:
            raise CorruptError(f"{path}: expected a chunk of {self._layout.chunk_bytes} bytes, found another size")


class ZarrArray(Array):
    """A zarr array by itself. `shape`, and `dtype` as Treering's text.

    `path` is its folder or, with `base`, its name in the OCDBT database in that folder.
    """

    def __init__(self, store: Store, path: str, *, driver: Driver = "zarr", base: str | None = None):
        parent, name = _place(path, base)
        folder = Folder(store, parent, ocdbt=base is not None)
        super().__init__(folder, name, driver, folder.metadata(name, driver))


def read(wanted: Sequence[tuple[Array, Box]], limit: int = IN_FLIGHT) -> list[np.ndarray]:
    """Boxes of arrays of one store, read at once as far as the limit of bytes in flight allows."""
    import tensorstore as ts

    found: list[np.ndarray] = []
    if not wanted:
        return found
    waiting = PendingReads(wanted[0][0].folder.store, limit)
    for array, box in wanted:
        out = array.room(box)
        found.append(out)
        if out.size:
            stored = array.open(box)
            for part, nbytes in array.split(box, limit):
                waiting.make_room(nbytes)
                target = ts.array(out[(*slices(part, box), ...)])  # a view, of 0-d arrays too
                waiting.add(target.write(stored[tuple(slice(*bounds) for bounds in part)]), nbytes, array.path)
    waiting.end()
    return found


class Writer:
    """Writes arrays into a folder, as plain files or as an OCDBT database, with a limit of bytes in flight.

    The processes of a `call` write one folder together. What process 0 writes is not synced: the code that publishes
    the folder does that. What the others write is durable after `close`.
    """

    def __init__(
        self, store: Store, path: str, *, driver: Driver, ocdbt: bool, call: Call = ALONE, limit: int = IN_FLIGHT
    ):
        import tensorstore as ts

        self._path, self._call, self._driver = path, call, driver
        self._merges = ocdbt and call.count > 1  # each process writes a database of its own
        own = part_of_database(path, call.index) if self._merges else path
        context = ts.Context({**_CONTEXT, "file_io_sync": call.index > 0})
        self._folder = Folder(store, own, ocdbt=ocdbt, options=_DATABASE, context=context)
        self._waiting = PendingReads(store, limit)
        self._sends_early = store.object_bytes is not None  # a bucket's files pass through memory
        self._unsent, self._limit = 0, limit
        self.count = 0  # keys that this process has written: chunks, and descriptions of arrays

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes it or, after an error, waits until nothing is written any more: the folder is about to be removed."""
        if kind is None:
            self.close()
        else:
            self._waiting.settle()

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which writes what is no part of an array."""
        return self._call.index == 0

    def add(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        read_box: Callable[[Box], np.ndarray],
        *,
        chunks: Chunks,
        compressor: Mapping[str, Any] | None,
    ) -> None:
        """Begins to write this process's chunks of an array, which `read_box` returns one by one. All are stored.

        The arrays that `read_box` returns must not change until `close`.
        """
        with self._waiting.ended_on_errors():
            self._add(name, shape, dtype, read_box, chunks, compressor)

    def close(self) -> None:
        """Waits until everything is written."""
        with self._waiting.ended_on_errors():
            self._send(lambda name: True)

    def _send(self, which: Callable[[str], bool]) -> None:
        """Waits until everything is written, and these files are where they belong."""
        self._waiting.end()
        self._folder.store.written_by_tensorstore(self._folder.path, self._folder.context, which)
        self._unsent = 0

    def complete(self, count: int) -> None:
        """Checks that all keys of all processes are there; makes one database of theirs, if they have written some.

        Called in process 0 when all have closed. The data stays where it is; so does Orbax when several processes save.
        Raises `SaveError` where this process does not see what the others have written.
        """
        if self._call.count == 1:
            return
        store, found = self._folder.store, 0

        def look() -> bool:
            nonlocal found
            found = self._merged() if self._merges else sum(1 for _ in files_in(store, self._path))
            return found == count

        if not wait_until(look, lambda: look_anew(store, self._path), self._call.timeout):
            raise SaveError(
                f"{self._path}: expected {count} chunks and descriptions of arrays, written by {self._call.count} "
                f"processes, found {found}; do all processes see the same file system?"
            )

    def _merged(self) -> int:
        """The number of keys in the database, after those of all processes are in it."""
        import tensorstore as ts

        store, context = self._folder.store, self._folder.context  # one context: else everything would be copied
        with errors(store, self._path):
            together = ts.Transaction(atomic=True)
            whole = Folder(store, self._path, ocdbt=True, options=_DATABASE, context=context)
            target = whole.keys.with_transaction(together)
            for index in range(self._call.count):
                path = part_of_database(self._path, index)
                part = Folder(store, path, ocdbt=True, options=_DATABASE, context=context)
                part.keys.experimental_copy_range_to(target).result()
            together.commit_async().result()
            return len(whole.list())

    def _add(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        read_box: Callable[[Box], np.ndarray],
        chunks: Chunks,
        compressor: Mapping[str, Any] | None,
    ) -> None:
        import tensorstore as ts

        metadata = zarr_metadata.new(self._driver, shape, dtype, chunks.shape, compressor)
        path, keys = posixpath.join(self._folder.path, name), self._folder.keys / _below(name)
        if self.is_first:
            text = msgspec.json.encode(metadata)
            self._waiting.add(keys.write(zarr_metadata.FILES[self._driver], text), len(text), path)
            self.count += 1
        spec = {"driver": self._driver, "metadata": metadata, "store_data_equal_to_fill_value": True}
        with errors(self._folder.store, path):
            context = self._folder.context
            array = ts.open(spec, kvstore=keys, open=True, assume_metadata=True, context=context).result()
        nbytes = math.prod(chunks.shape) * dtypes.itemsize(dtype)
        for box in chunks.written(shape):
            self._waiting.make_room(nbytes)
            part = array[tuple(slice(*bounds) for bounds in box)]
            self._waiting.add(part.write(read_box(box), can_reference_source_data_indefinitely=True), nbytes, path)
            self.count += 1
            self._unsent += nbytes
            if self._sends_early and self._unsent >= self._limit // 2:
                self._send(lambda name: not self._folder.reads_again(name))


def _indices(axes: Sequence[range]) -> Iterator[tuple[int, ...]]:
    """The items of `itertools.product`, which would first make lists of the ranges, however long they claim to be."""
    if not axes:
        yield ()
        return
    for first in axes[0]:
        for rest in _indices(axes[1:]):
            yield (first, *rest)


def _stat(store: Store, path: str) -> Stat | None:
    with reading(path):
        return store.stat(path)


def _check_file(path: str, there: Stat | None) -> Stat:
    if there is None:
        raise CorruptError(f"{path}: expected a chunk, found nothing")
    if not there.is_file:
        raise CorruptError(f"{path}: expected a file, found a folder, a pipe or a device")
    return there


def part_of_database(path: str, index: int) -> str:
    """The folder in which a process writes its part of a database; see `DATABASE_PARTS`."""
    return posixpath.join(path, f"ocdbt.process_{index}")


def _below(name: str) -> str:
    """The prefix of the keys of an array."""
    return name if not name or name.endswith("/") else f"{name}/"


def _about(name: str, driver: Driver) -> str:
    """The key of an array's metadata."""
    return _below(name) + zarr_metadata.FILES[driver]


def _place(path: str, base: str | None) -> tuple[str, str]:
    """A folder, and the name of an array in it."""
    return posixpath.split(path.rstrip("/")) if base is None else (base, path.rstrip("/"))
