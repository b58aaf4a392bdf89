"""Zarr arrays, as plain files or in an OCDBT database, through TensorStore.

TensorStore does its own reading and writing, below the `Disk` that everything else goes through. All calls of it are
here. It fills in missing chunks unless it is told not to, believes sizes, and ends the process when there is no
memory for them; so sizes are checked first, against the files where that can be done.
"""

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from .. import _dtypes, stores
from .._sharding import Box, extent, slices
from ..errors import CorruptError, UnsafeError, UnsupportedError
from ..stores.disk import opened, read_file
from . import zarr_metadata

Driver = Literal["zarr", "zarr3"]
IN_FLIGHT = 256 << 20  # bytes of chunks that are read or written at a time; a larger chunk passes alone
_KEPT = 256 << 20  # bytes of decoded chunks kept of an array of which parts of chunks are read
_PROBED = 64 << 20  # bytes from which on it is asked first whether there is memory for them
_MOST_METADATA = 16 << 20  # bytes of an array's metadata that can be meant
_LISTED = 1000  # chunks of a database from which on a list of them is asked for
_CONTEXT = {"cache_pool#nodes": {"total_bytes_limit": 64 << 20}, "file_io_concurrency": {"limit": 32}}
_DAMAGE = ("NOT_FOUND", "DATA_LOSS", "FAILED_PRECONDITION", "OUT_OF_RANGE", "INVALID_ARGUMENT")


class Folder:
    """A folder of zarr arrays: plain files or, with `ocdbt`, one OCDBT database."""

    def __init__(self, path: str, *, ocdbt: bool):
        import tensorstore as ts

        self.path, self.ocdbt = path, ocdbt
        self.context = ts.Context(_CONTEXT)
        files: dict[str, Any] = {"driver": "file", "path": os.path.join(path, "")}
        spec = {"driver": "ocdbt", "base": files, "cache_pool": "cache_pool#nodes"} if ocdbt else files
        self.keys = _result(ts.KvStore.open(spec, context=self.context), path)
        self.kept: tuple[Array, Any] | None = None  # the array that was last read in parts of chunks

    def list(self, prefix: str = "") -> "list[str]":
        """The keys of a database that start with a prefix. Raises `CorruptError` when it cannot be read."""
        import tensorstore as ts

        start = prefix.encode()
        between = ts.KvStore.KeyRange(start, start + b"\xff" if start else b"")
        found = _result(self.keys.list(between), self.path)
        return sorted(key.decode(errors="surrogateescape") for key in found)

    def arrays(self, names: "Sequence[str]", driver: Driver) -> "list[Array]":
        """The arrays of these names, whose metadata is read at once. Raises `CorruptError` where that is missing."""
        keys = [f"{name}/{zarr_metadata.FILES[driver]}" for name in names]
        found = self._values(keys) if self.ocdbt else map(self._file, keys)
        return [Array(self, name, driver, data) for name, data in zip(names, found, strict=True)]

    def metadata(self, name: str, driver: Driver) -> bytes:
        """The metadata of one array."""
        key = f"{name}/{zarr_metadata.FILES[driver]}"
        return next(self._values([key])) if self.ocdbt else self._file(key)

    def _values(self, keys: "Sequence[str]") -> Iterator[bytes]:
        futures = [self.keys.read(key) for key in keys]
        for key, future in zip(keys, futures, strict=True):
            found = _result(future, self.path)
            if found.state != "value":
                raise CorruptError(f"{os.path.join(self.path, key)}: expected an array's metadata, found nothing")
            yield found.value

    def _file(self, key: str) -> bytes:
        path = os.path.join(self.path, key)
        there = stores.DISK.stat(path)
        if there is None:
            raise CorruptError(f"{path}: expected an array's metadata, found nothing")
        if there.st_size > _MOST_METADATA:
            raise UnsafeError(f"{path}: {there.st_size} bytes, which cannot be meant as an array's metadata")
        return read_file(stores.DISK, path)


class Array:
    """A zarr array in a folder, given its metadata; see `treering.formats.foreign.Stored`.

    Every chunk has to be there: a missing one is a `CorruptError` that names it, whatever the fill value.
    """

    def __init__(self, folder: Folder, name: str, driver: Driver, metadata: bytes):
        self.folder, self.name, self.driver = folder, name, driver
        self.path = os.path.join(folder.path, name)
        self._layout = zarr_metadata.parse(metadata, driver, self.path)
        self.shape, self.dtype = self._layout.shape, self._layout.dtype

    @property
    def nbytes(self) -> int:
        """The size of the elements."""
        return math.prod(self.shape) * self._layout.itemsize

    def can_map(self) -> bool:
        return False

    def read(self, box: Box, map: bool) -> np.ndarray:
        return read([(self, box)])[0]

    def start_reading(self, box: Box, limit: int) -> "tuple[np.ndarray, Iterator[tuple[int, Any]]]":
        """The array that a box goes into, and what is to be waited for: bytes of chunks, and a future, of each part.

        A part is begun when it is asked for. Parts are of whole chunks, of at most `limit` bytes together.
        """
        _check_room(math.prod(extent(box)) * self._layout.itemsize, self.path)
        _check_room(self._layout.chunk_bytes, self.path)
        out = np.empty(extent(box), _dtypes.to_numpy(self.dtype))
        return out, self._parts(box, out, limit) if out.size else iter(())

    def _parts(self, box: Box, out: np.ndarray, limit: int) -> Iterator[tuple[int, Any]]:
        import tensorstore as ts

        self._check_chunks(box)
        stored = self._open(box)
        for part, nbytes in self._split(box, limit):
            target = out[slices(part, box)]
            yield nbytes, ts.array(target).write(stored[tuple(slice(*bounds) for bounds in part)])

    def _open(self, box: Box) -> Any:
        """The array in TensorStore; with a memory for chunks, of the array last read, when they are read in parts."""
        import tensorstore as ts

        bounds = zip(box, self.shape, self._layout.chunks, strict=True)
        in_part = any(start % chunk or (stop % chunk and stop != size) for (start, stop), size, chunk in bounds)
        kept = self.folder.kept
        if in_part and kept and kept[0] is self:
            return kept[1]
        self.folder.kept = None
        context = self.folder.context
        if in_part:
            most = max(_KEPT, self._layout.chunk_bytes + (1 << 20))
            context = ts.Context({"cache_pool": {"total_bytes_limit": most}}, context)
        spec = {"driver": self.driver, "metadata": self._layout.spec, "fill_missing_data_reads": False}
        if in_part:
            spec["recheck_cached_data"] = "open"
        kvstore = self.folder.keys / f"{self.name}/"
        future = ts.open(spec, kvstore=kvstore, open=True, assume_metadata=True, context=context)
        opened = _result(future, self.path)
        if opened.dtype.numpy_dtype != _dtypes.to_numpy(self.dtype) or opened.shape != self.shape:
            raise CorruptError(f"{self.path}: expected {self.dtype}{list(self.shape)}, found {opened.dtype}")
        if in_part:
            self.folder.kept = (self, opened)
        return opened

    def _split(self, box: Box, limit: int) -> Iterator[tuple[Box, int]]:
        """Parts of a box that are cut between chunks, and the bytes of the chunks they touch."""
        stack = [box]
        while stack:
            part = stack.pop()
            firsts = [start // chunk for (start, _), chunk in zip(part, self._layout.chunks, strict=True)]
            counts = [-(-stop // c) - n for (_, stop), c, n in zip(part, self._layout.chunks, firsts, strict=True)]
            nbytes = math.prod(counts) * self._layout.chunk_bytes
            axis = next((axis for axis, count in enumerate(counts) if count > 1), None)
            if nbytes <= limit or axis is None:
                yield part, nbytes
                continue
            middle = (firsts[axis] + counts[axis] // 2) * self._layout.chunks[axis]
            (start, stop), before, after = part[axis], part[:axis], part[axis + 1 :]
            stack += [(*before, (middle, stop), *after), (*before, (start, middle), *after)]

    def _check_chunks(self, box: Box) -> None:
        """Raises `CorruptError` for chunks of a box that are not there, or cannot be what the metadata says."""
        chunks = self._layout.chunks
        axes = [range(start // c, -(-stop // c)) for (start, stop), c in zip(box, chunks, strict=True)]
        keys = (f"{self.name}/{self._layout.key(index)}" for index in itertools.product(*axes))
        if not self.folder.ocdbt:
            for key in keys:
                self._check_file(os.path.join(self.folder.path, key))
            return
        if math.prod(map(len, axes)) > _LISTED:
            found = set(self.folder.list(f"{self.name}/"))
            if missing := next((key for key in keys if key not in found), None):
                raise CorruptError(f"{self.folder.path}: the chunk {missing} is missing")
        elif self._layout.blosc:
            for key in keys:
                value = _result(self.folder.keys.read(key, byte_range=slice(None, 16)), self.path).value
                self._check_blosc(value, key)

    def _check_file(self, path: str) -> None:
        there = stores.DISK.stat(path)
        if there is None:
            raise CorruptError(f"{path}: expected a chunk of the array, found nothing; it is missing")
        nbytes = self._layout.chunk_bytes
        if self._layout.plain and there.st_size != nbytes:
            raise CorruptError(f"{path}: expected a chunk of {nbytes} bytes, found {there.st_size}")
        if not self._layout.sharded and there.st_size > 2 * nbytes + (1 << 20):
            raise UnsafeError(f"{path}: {there.st_size} bytes, which cannot be a chunk of {nbytes}")
        if self._layout.blosc:
            head = bytearray(16)
            with opened(stores.DISK, path) as fd:
                stores.DISK.read(fd, memoryview(head), 0)
            self._check_blosc(head, path)

    def _check_blosc(self, head: bytes, path: str) -> None:
        """Blosc reserves what a chunk claims."""
        if int.from_bytes(head[4:8], "little") != self._layout.chunk_bytes:
            raise CorruptError(f"{path}: expected a chunk of {self._layout.chunk_bytes} bytes, found another size")


class ZarrArray(Array):
    """A zarr array by itself. `shape`, and `dtype` as Treering's text.

    `path` is its folder or, with `base`, its name in the OCDBT database in that folder.
    """

    def __init__(self, path: str, *, driver: Driver = "zarr", base: str | None = None):
        parent, name = os.path.split(os.path.normpath(path)) if base is None else (base, path.rstrip("/"))
        folder = Folder(parent, ocdbt=base is not None)
        super().__init__(folder, name, driver, folder.metadata(name, driver))


def read(wanted: Iterable[tuple[Array, Box]], limit: int = IN_FLIGHT) -> list[np.ndarray]:
    """Boxes of arrays, read at once as far as the limit of bytes in flight allows."""
    found: list[np.ndarray] = []
    waiting: deque[tuple[str, int, Any]] = deque()
    held = 0
    for array, box in wanted:
        out, parts = array.start_reading(box, limit)
        found.append(out)
        for nbytes, future in parts:
            waiting.append((array.path, nbytes, future))
            held += nbytes
            while held > limit:
                path, nbytes, future = waiting.popleft()
                _result(future, path)
                held -= nbytes
    for path, _, future in waiting:
        _result(future, path)
    return found


def _check_room(nbytes: int, path: str) -> None:
    """Raises `UnsupportedError` when there cannot be so much memory."""
    if nbytes >= _PROBED:
        try:
            np.empty(nbytes, np.uint8)
        except (MemoryError, ValueError):
            raise UnsupportedError(f"{path}: {nbytes} bytes at a time do not fit into memory; read a slice") from None


def _result(future: Any, path: str) -> Any:
    """What comes of a future, with TensorStore's errors as ours."""
    try:
        return future.result()
    except ValueError as error:
        text = str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0]
        kind = CorruptError if text.startswith(_DAMAGE) else OSError
        raise kind(f"{path}: {text}") from None
