"""What formats of zarr arrays share: reading arrays at once, writing leaves, and listing the files they own."""

import math
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..._core import dtypes, expansion
from ..._core.boxes import Box, box_shape, full_box, slice_boxes
from ..._core.calls import Call
from ..._core.entries import ArrayEntry, Entry
from ..._core.layouts import Layout
from ..._core.source import Source
from ...errors import CorruptError, ExistsError, TreeringError, UnsafeError
from ...stores.file_io import files_in, is_folder, read_file
from ...stores.read_errors import raise_if_momentary, reading
from ...stores.store import Store
from .._shared.msgpack import beginning
from .._shared.reader import ForeignReader, Stored, beginning_within
from . import array as zarr
from . import metadata
from .chunks import Chunks, assign_chunks
from .folder import DATABASE, DATABASE_PARTS, IN_FLIGHT, Driver
from .writer import ZarrWriter

_MAX_CHUNK_BYTES = 16 << 20  # bytes of a chunk that is written
# Elements of an array for each byte of its files; zstd compresses 32,768 bytes into one at most
_MAX_ELEMENTS_PER_BYTE = 1 << 16
_MAX_LISTED_CHUNKS = 1 << 18  # chunks that an array may claim; each takes time even if its file is missing
_MAX_DAMAGED_CHUNKS = 10_000  # damaged chunks of an array that are named one by one
_MAGIC = bytes.fromhex("0cdb3a2a")  # the first bytes of a database's manifest
_DATA, _DATA_FILE = "d", re.compile(r"v?[0-9a-f]{32}")  # the folder of a database's other files, and their names
_MAX_UNSTORED_ELEMENTS = 1 << 34  # elements that an array may claim without a byte on disk, if chunks may be missing


class ZarrReader(ForeignReader):
    """Reads all zarr arrays among its arrays at once.

    `nbytes` is the size of all files. Raises `UnsafeError` for arrays that no compression could fit into it.
    """

    expands = True

    def __init__(
        self,
        format: str,
        path: str,
        entries: Sequence[Entry],
        arrays: Mapping[str, Stored],
        *,
        nbytes: int,
        **metadata_key: Any,
    ):
        super().__init__(format, path, entries, arrays, nbytes=nbytes, **metadata_key)
        for name, array in arrays.items():
            if isinstance(array, zarr.Array):
                size = math.prod(max(n, 1) for n in array.shape)
                if size > _MAX_ELEMENTS_PER_BYTE * nbytes + (_MAX_UNSTORED_ELEMENTS if array.filled else 0):
                    raise UnsafeError(
                        f"{path}: {name} claims {size} elements, but all files together have {nbytes} bytes"
                    )
                if array.filled and array.cells > _MAX_LISTED_CHUNKS + nbytes:
                    raise UnsafeError(f"{path}: {name} claims {array.cells} chunks, too many for {nbytes} bytes")

    def can_mmap(self, requested: bool | None) -> bool:
        return False

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, mmap: bool | None = None
    ) -> list[np.ndarray]:
        expansion.check_memory(self, wanted, self.path)
        arrays = [self._arrays[entry.path] for entry, _ in wanted]
        boxes = [(array, box) for array, (_, box) in zip(arrays, wanted, strict=True) if isinstance(array, zarr.Array)]
        rest = [pair for array, pair in zip(arrays, wanted, strict=True) if not isinstance(array, zarr.Array)]
        with reading(self.path):
            found, others = iter(zarr.read(boxes)), iter(super().read(rest, verify=verify, mmap=mmap))
        return [next(found if isinstance(array, zarr.Array) else others) for array in arrays]

    def _damage_of(self, entry: ArrayEntry, begin: int, end: int) -> Iterator[str]:
        array = self._arrays[entry.path]
        if not isinstance(array, zarr.Array):
            yield from super()._damage_of(entry, begin, end)
            return
        size = dtypes.itemsize(entry.dtype)
        parts = ((part, size * math.prod(box_shape(part))) for part, _ in array.split(full_box(array.shape), IN_FLIGHT))
        yield from _damage(array, beginning_within(begin, end, parts))


def _damage(array: zarr.Array, parts: Iterable[Box]) -> Iterator[str]:
    """Reads parts of an array and yields what is damaged, chunk by chunk in the parts that fail."""
    seen: set[str] = set()
    for part in parts:
        try:
            array.read(part, False)
            continue
        except (CorruptError, OSError) as error:
            raise_if_momentary(error)
        for box, _ in array.split(part, 0):
            try:
                array.read(box, False)
            except (CorruptError, OSError) as error:
                raise_if_momentary(error)
                if str(error) not in seen:
                    seen.add(str(error))
                    yield str(error)
            if len(seen) >= _MAX_DAMAGED_CHUNKS:
                yield f"{array.path}: {len(seen)} chunks are damaged, and Treering did not read the chunks after them"
                return


def chunks_of(call: Call, layouts: Mapping[str, Layout], entries: Iterable[Entry | None]) -> dict[str, Chunks]:
    """Returns the chunks of the arrays among some entries, by path; see `assign_chunks`."""
    arrays = [entry for entry in entries if isinstance(entry, ArrayEntry)]
    return assign_chunks(call, arrays, layouts, _MAX_CHUNK_BYTES, _is_one_run)


def _is_one_run(entry: ArrayEntry) -> list[int]:
    """Returns the shape of chunks that are contiguous in the array they come from."""
    first = next(slice_boxes(entry.shape, dtypes.itemsize(entry.dtype), _MAX_CHUNK_BYTES), ())
    return [max(size, 1) for size in box_shape(first)] or [1] * len(entry.shape)


def add_array(writer: ZarrWriter, name: str, entry: ArrayEntry, contents: Source, chunks: Chunks) -> None:
    """Writes an array in chunks."""

    def read_box(box: Box) -> np.ndarray:
        return contents.read([(entry, box)], verify=True)[0]

    writer.add(name, entry.shape, entry.dtype, read_box, chunks=chunks, compressor=None)


def add_number(writer: ZarrWriter, name: str, value: complex) -> None:
    """Writes a Python number as an array without axes."""
    array = np.array(value)
    own = None if writer.is_first else frozenset[Box]()
    writer.add(name, (), dtypes.to_text(array.dtype), lambda box: array, chunks=Chunks((), own), compressor=None)


def parts_of(store: Store, folder: str, name: str, driver: Driver) -> Iterator[str]:
    """Yields the files of a zarr array in a folder, as paths within the folder: its metadata and its chunks.

    Yields nothing if the metadata cannot be read, because then the names of the chunks are unknown.
    """
    path, metadata_key = posixpath.join(folder, name), metadata.FILES[driver]
    try:
        layout = metadata.parse(read_file(store, posixpath.join(path, metadata_key)), driver, path)
    except (TreeringError, OSError) as error:
        raise_if_momentary(error)
        return
    for file in files_in(store, path):
        if file in (metadata_key, ".zattrs") or layout.has_chunk(file):
            yield f"{name}/{file}" if name else file


def database_parts(store: Store, folder: str) -> Iterator[str]:
    """Yields the files of an OCDBT database in a folder, as paths within the folder; none without a database.

    Includes the databases that single processes wrote: the merged database refers to their data.
    """
    if beginning(store, posixpath.join(folder, DATABASE), len(_MAGIC)) != _MAGIC:
        return
    for name in filter(DATABASE_PARTS.fullmatch, store.list(folder)):
        place = posixpath.join(folder, name)
        if name == DATABASE:
            yield name
        elif name == _DATA and is_folder(store, place):
            yield from (f"{name}/{file}" for file in filter(_DATA_FILE.fullmatch, store.list(place)))
        elif is_folder(store, place):
            yield from (f"{name}/{part}" for part in database_parts(store, place))


def parts_of_arrays(store: Store, path: str, open_reader: Callable[[], ForeignReader]) -> set[str]:
    """Returns the files of all zarr arrays that the reader of a folder has, as paths within the folder.

    Raises `ExistsError` if the reader cannot be opened and the folder contains folders: their owner is unknown.
    """
    found: set[str] = set()
    databases: set[str] = set()
    try:
        arrays = [array for array in open_reader().stored() if isinstance(array, zarr.Array)]
    except (TreeringError, OSError) as error:
        raise_if_momentary(error)
        if any(is_folder(store, posixpath.join(path, name)) for name in store.list(path)):
            raise ExistsError(
                f"{path}: expected a checkpoint to replace, found one that cannot be opened, so its files are "
                f"unknown: {error}; write to another path, or remove it yourself"
            ) from None
        return found
    for array in arrays:
        folder = posixpath.relpath(array.folder.path, path)
        prefix = "" if folder == "." else f"{folder}/"
        if not array.folder.ocdbt:
            found.update(prefix + part for part in parts_of(store, array.folder.path, array.name, array.driver))
        elif folder not in databases:
            databases.add(folder)
            found.update(prefix + part for part in database_parts(store, array.folder.path))
    return found


def folder_size(store: Store, path: str) -> int:
    """Returns the bytes of all files in a folder, without what links to folders lead to."""
    total = 0
    for name in store.list(path):
        inner = posixpath.join(path, name)
        there = store.stat(inner)
        if there is not None and there.is_folder:
            total += 0 if store.is_link(inner) else folder_size(store, inner)
        elif there is not None:
            total += there.nbytes
    return total
