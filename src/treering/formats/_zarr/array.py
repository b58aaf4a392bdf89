"""Reads zarr arrays through TensorStore.

By default TensorStore replaces missing chunks with the fill value. It believes the sizes that files claim, and ends
the process when it cannot allocate them. So this module checks sizes first, against the files where it can.
"""

import contextlib
import math
import posixpath
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, box_shape, slices
from ...errors import CorruptError, UnsafeError, UnsupportedError
from ...stores import file_io
from ...stores.buffers import empty_aligned_array
from ...stores.file_io import opened
from ...stores.read_errors import reading
from ...stores.store import Store
from .._shared.reader import attempt
from . import metadata as zarr_metadata
from .folder import (
    IN_FLIGHT,
    MAX_METADATA_BYTES,
    TENSORSTORE,
    Driver,
    Folder,
    PendingReads,
    check_file,
    errors,
    key_prefix,
    stat,
)

_MAX_KEPT_BYTES = 128 << 20  # bytes of decoded chunks that stay in memory while an array is read in parts of chunks
_MIN_KEPT_CHUNK_BYTES = 8 << 20  # bytes of a part of a chunk from which on the decoded chunks are kept
_MIN_PROBED_BYTES = 64 << 20  # bytes from which on an allocation is tried before TensorStore makes its own
_MAX_UNLISTED_CHUNKS = 4  # chunks whose sizes are asked for one by one; for more, one listing of the store is cheaper
# Bytes that TensorStore needs for each chunk that is being read, in addition to the chunk
_CHUNK_OVERHEAD_BYTES = 4 << 10


# What a missing chunk means. It depends on the writer:
# "damage": the writer stores every chunk.
# "fill": a missing chunk has the fill value, or is zero if the metadata has none.
# "metadata": the writer leaves out chunks that equal the fill value, as TensorStore does by default. If the metadata
#   has none (null in zarr 2), it stores every chunk.
# "doubt": as "metadata", but the writer may have been TensorStore before 0.1.17. Without a fill value, that release
#   left out chunks of zeros, too.
Missing = Literal["damage", "fill", "metadata", "doubt"]


class Array:
    """Reads a zarr array in a folder, given its metadata; see `Stored` in `formats._shared.reader`.

    `missing` says what a missing chunk means. One that means damage raises `CorruptError` with its path. One that may
    be damage raises `UnsupportedError`, so that no checkpoint is passed over that may be good.
    """

    def __init__(self, folder: Folder, name: str, driver: Driver, metadata: bytes, *, missing: Missing = "damage"):
        self.folder, self.name = folder, name
        self.driver: Driver = driver
        self.path = posixpath.join(folder.path, name)
        self._layout = zarr_metadata.parse(metadata, driver, self.path)
        self.shape, self.dtype = self._layout.shape, self._layout.dtype
        has_value = self._layout.fill_value is not None
        self.filled = missing == "fill" or (missing != "damage" and has_value)
        self._in_doubt = missing == "doubt" and not has_value and zarr_metadata.may_lack_zeros(metadata)

    @property
    def cells(self) -> int:
        """The number of cells: the parts that are read at a time."""
        return math.prod(-(-n // cell) for n, cell in zip(self.shape, self._layout.cells, strict=True))

    def can_map(self) -> bool:
        return False

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        return read([(self, box)])[0]

    def room(self, box: Box) -> np.ndarray:
        """Allocates memory for a box. Raises `UnsupportedError` if it or one chunk does not fit into memory."""
        nbytes = math.prod(box_shape(box)) * self._layout.itemsize
        most = max(nbytes, self._layout.cell_bytes)
        try:
            # TensorStore ends the process if it cannot allocate a chunk, so this allocation must fail first.
            if most >= _MIN_PROBED_BYTES:
                np.empty(most, np.uint8)
            return empty_aligned_array(box_shape(box), dtypes.to_numpy(self.dtype))
        except (MemoryError, ValueError):
            raise UnsupportedError(f"{self.path}: expected memory for {most} bytes at once, found too little") from None

    def open(self, box: Box) -> Any:
        """Opens the array in TensorStore, and checks the chunks that the box needs.

        When large parts of chunks are read, the decoded chunks stay in memory until the end of this array is read or
        another array is opened.
        """
        import tensorstore as ts

        TENSORSTORE.check()
        folder, kept = self.folder, self.folder.cached_array
        folder.cached_array = None  # at most one array of a folder keeps its chunks
        keep = self._is_in_parts(box)
        if keep and kept and kept[0] is self:
            stored = kept[1]
        else:
            about = dict(self._layout.spec)
            if self.filled:
                about["fill_value"] = self._layout.fill_value
            spec = {"driver": self.driver, "metadata": about, "fill_missing_data_reads": self.filled}
            context = folder.context
            if keep:
                # Every part of a chunk would otherwise ask for the file again.
                spec["recheck_cached_data"] = "open"
                # A cache smaller than one chunk would decode it for each of its parts.
                most = max(_MAX_KEPT_BYTES, self._layout.cell_bytes + (1 << 20))
                context = ts.Context({"cache_pool": {"total_bytes_limit": most}}, context)
            kvstore = folder.keys / key_prefix(self.name)
            try:
                stored = ts.open(spec, kvstore=kvstore, open=True, assume_metadata=True, context=context).result()
            # Opening reads no file, so the metadata is valid JSON that TensorStore refuses.
            except (ValueError, OverflowError) as error:
                text = str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0]
                raise UnsupportedError(f"{self.path}: expected metadata that TensorStore reads: {text:.300}") from None
            if stored.dtype.numpy_dtype != dtypes.to_numpy(self.dtype) or stored.shape != self.shape:
                raise CorruptError(f"{self.path}: expected {self.dtype}{list(self.shape)}, found {stored.dtype.name}")
        # Only now: files of unknown codecs may look damaged.
        self._check_chunks(box)
        if keep and any(stop != size for (_, stop), size in zip(box, self.shape, strict=True)):
            folder.cached_array = (self, stored)
        return stored

    def split(self, box: Box, limit: int) -> Iterator[tuple[Box, int]]:
        """Yields parts of a box, cut between chunks, and the bytes each takes: at most `limit`, or one chunk."""
        stack = [box]
        while stack:
            part = stack.pop()
            firsts = [start // cell for (start, _), cell in zip(part, self._layout.cells, strict=True)]
            counts = [-(-stop // c) - n for (_, stop), c, n in zip(part, self._layout.cells, firsts, strict=True)]
            nbytes = math.prod(counts) * (self._layout.cell_bytes + _CHUNK_OVERHEAD_BYTES)
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
        return cut and math.prod(box_shape(box)) * self._layout.itemsize >= _MIN_KEPT_CHUNK_BYTES

    def _check_chunks(self, box: Box) -> None:
        """Raises `CorruptError` for chunks of a box that contradict the metadata, as far as the files show it.

        TensorStore reports the missing chunks of a database when it reads them.
        """
        chunks = self._layout.chunks
        axes = [range(start // c, -(-stop // c)) for (start, stop), c in zip(box, chunks, strict=True)]
        keys = (key_prefix(self.name) + self._layout.key(index) for index in _indices(axes))
        if not self.folder.ocdbt:
            several = math.prod(map(len, axes)) > _MAX_UNLISTED_CHUNKS
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
        nbytes, there = self._layout.chunk_bytes, stat(self.folder.store, path)
        if there is None and self.filled:
            return
        if there is None and self._in_doubt:
            raise UnsupportedError(
                f"{path}: expected a chunk, found nothing; it is lost, or it is all zeros, which TensorStore before "
                "0.1.17 (T5X until early 2022) did not store. If the checkpoint is that old, open it with "
                "format='t5x-without-zeros' (treering.convert: source_format=); if not, restore another one"
            )
        there = check_file(path, there)
        if self._layout.plain and there.nbytes != nbytes:
            file_io.check_all_fetched(self.folder.store, path)
            raise CorruptError(f"{path}: expected a chunk of {nbytes} bytes, found {there.nbytes}")
        # Compression can enlarge a chunk, but never by so much.
        if there.nbytes > 2 * nbytes + MAX_METADATA_BYTES:
            raise UnsafeError(f"{path}: expected a compressed chunk of {nbytes} bytes, found a file of {there.nbytes}")
        if self._layout.blosc:
            with reading(path), opened(self.folder.store, path) as blob:
                head = blob.read_up_to(16)
                file_io.check_blob_fetched(blob)
            self._check_blosc(head, path)

    def _check_blosc(self, head: bytes | bytearray, path: str) -> None:
        """Checks the size that a Blosc chunk claims, which Blosc would believe."""
        if int.from_bytes(head[4:8], "little") != self._layout.chunk_bytes:
            raise CorruptError(f"{path}: expected a chunk of {self._layout.chunk_bytes} bytes, found another size")


class ZarrArray(Array):
    """Reads one zarr array by its path. `dtype` is in Treering's text form.

    `path` is the array's folder or, with `base`, its name in the OCDBT database of the folder `base`.
    """

    def __init__(self, store: Store, path: str, *, driver: Driver = "zarr", base: str | None = None):
        parent, name = _place(path, base)
        folder = Folder(store, parent, ocdbt=base is not None)
        (text,) = folder.metadata([name], driver)
        if isinstance(text, CorruptError):
            raise text
        super().__init__(folder, name, driver, text)


def find(
    folder: Folder, names: Sequence[str], driver: Driver, *, missing: Missing = "damage"
) -> list[Array | CorruptError]:
    """Opens the array of each name, or returns why it cannot; reads the metadata of all at once."""
    return [
        text if isinstance(text, CorruptError) else attempt(partial(Array, folder, name, driver, text, missing=missing))
        for name, text in zip(names, folder.metadata(names, driver), strict=True)
    ]


def read(wanted: Sequence[tuple[Array, Box]], limit: int = IN_FLIGHT) -> list[np.ndarray]:
    """Reads boxes of arrays of one store, in parallel within the limit of bytes in flight."""
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
                target = ts.array(out[(*slices(part, box), ...)])  # a view, also of an array without axes
                waiting.add(target.write(stored[tuple(slice(*bounds) for bounds in part)]), nbytes, array.path)
    waiting.end()
    return found


def _indices(axes: Sequence[range]) -> Iterator[tuple[int, ...]]:
    """Yields what `itertools.product` does, which would first build lists of ranges of any claimed length."""
    if not axes:
        yield ()
        return
    for first in axes[0]:
        for rest in _indices(axes[1:]):
            yield (first, *rest)


def _place(path: str, base: str | None) -> tuple[str, str]:
    """Returns a folder and the name of an array in it."""
    return posixpath.split(path.rstrip("/")) if base is None else (base, path.rstrip("/"))
