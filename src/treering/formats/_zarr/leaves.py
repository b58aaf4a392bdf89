"""The common parts of formats that consist of zarr arrays: reading them at once, writing leaves, listing files."""

import math
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, box_shape, in_slices, whole
from ..._core.entries import ArrayEntry, Entry
from ..._core.source import Source
from ..._processes.assignment import Layout
from ..._processes.calls import Call
from ...errors import CorruptError, ExistsError, TreeringError, UnsafeError
from ...stores.read_errors import raise_if_momentary, reading
from ...stores.store import Store
from ...stores.whole_files import files_in, is_folder, read_file
from .._shared.msgpack import beginning
from .._shared.reader import ForeignReader, Stored, beginning_within
from . import array as zarr
from . import metadata
from .chunks import Chunks, assigned
from .folder import DATABASE, DATABASE_PARTS, IN_FLIGHT, Driver
from .writer import Writer

_CHUNK = 16 << 20  # bytes
_RATIO = 1 << 16  # elements of an array for each byte of the files; zstd makes 32768 bytes of one at most
_MAX_LISTED_CHUNKS = 1 << 18  # chunks, of which each takes time even when it is left out
_MOST_DAMAGE = 10_000  # chunks of an array that are named one by one
_MAGIC = bytes.fromhex("0cdb3a2a")  # with which the manifest of a database begins
_DATA, _DATA_FILE = "d", re.compile(r"v?[0-9a-f]{32}")  # the folder of its other files, and their names
_LEFT_OUT = 1 << 34  # elements for which there need not be a byte where chunks may be left out


class ZarrReader(ForeignReader):
    """A reader that reads all zarr arrays among its arrays at once.

    `nbytes` are those of all files. Raises `UnsafeError` for arrays larger than any compression makes of them.
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
        **about: Any,
    ):
        super().__init__(format, path, entries, arrays, nbytes=nbytes, **about)
        for name, array in arrays.items():
            if isinstance(array, zarr.Array):
                size = math.prod(max(n, 1) for n in array.shape)
                if size > _RATIO * nbytes + (_LEFT_OUT if array.filled else 0):
                    raise UnsafeError(
                        f"{path}: {name} claims {size} elements, but all files are {nbytes} bytes together"
                    )
                if array.filled and array.cells > _MAX_LISTED_CHUNKS + nbytes:
                    raise UnsafeError(f"{path}: {name} claims {array.cells} chunks, which cannot all be left out")

    def can_mmap(self, requested: bool | None) -> bool:
        return False

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, mmap: bool | None = None
    ) -> list[np.ndarray]:
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
        parts = ((part, size * math.prod(box_shape(part))) for part, _ in array.split(whole(array.shape), IN_FLIGHT))
        yield from _damage(array, beginning_within(begin, end, parts))


def _damage(array: zarr.Array, parts: Iterable[Box]) -> Iterator[str]:
    """Reads parts of an array and yields the damage, chunk by chunk where there is some."""
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
            if len(seen) >= _MOST_DAMAGE:
                yield f"{array.path}: {len(seen)} chunks are damaged, and what comes after them was not looked at"
                return


def chunks_of(call: Call, layouts: Mapping[str, Layout], entries: Iterable[Entry | None]) -> dict[str, Chunks]:
    """The chunks of the arrays among some entries, by path; see `assigned`."""
    arrays = [entry for entry in entries if isinstance(entry, ArrayEntry)]
    return assigned(call, arrays, layouts, _CHUNK, _one_run)


def _one_run(entry: ArrayEntry) -> list[int]:
    """The shape of chunks that lie in one piece where an array comes from."""
    first = next(in_slices(entry.shape, dtypes.itemsize(entry.dtype), _CHUNK), ())
    return [max(size, 1) for size in box_shape(first)] or [1] * len(entry.shape)


def add_array(writer: Writer, name: str, entry: ArrayEntry, contents: Source, chunks: Chunks) -> None:
    """Writes an array in chunks."""

    def read_box(box: Box) -> np.ndarray:
        return contents.read([(entry, box)], verify=True)[0]

    writer.add(name, entry.shape, entry.dtype, read_box, chunks=chunks, compressor=None)


def add_number(writer: Writer, name: str, value: complex) -> None:
    """Writes a number of Python as an array without axes."""
    array = np.array(value)
    own = None if writer.is_first else frozenset[Box]()
    writer.add(name, (), dtypes.to_text(array.dtype), lambda box: array, chunks=Chunks((), own), compressor=None)


def parts_of(store: Store, folder: str, name: str, driver: Driver) -> Iterator[str]:
    """The files of a zarr array in a folder, by their paths within the folder: its metadata and its chunks.

    The files of an array whose metadata cannot be read are unknown.
    """
    path, about = posixpath.join(folder, name), metadata.FILES[driver]
    try:
        layout = metadata.parse(read_file(store, posixpath.join(path, about)), driver, path)
    except (TreeringError, OSError) as error:
        raise_if_momentary(error)
        return
    for file in files_in(store, path):
        if file in (about, ".zattrs") or layout.has_chunk(file):
            yield f"{name}/{file}" if name else file


def database_parts(store: Store, folder: str) -> Iterator[str]:
    """The files of an OCDBT database in a folder, by their paths within the folder; none where there is no database.

    Those of the databases that several processes wrote, and from which it was merged, are included.
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
    """The files of all zarr arrays that the reader of a folder has, by their paths within the folder.

    Raises `ExistsError` for folders in it when it cannot be opened: it is unknown then what they are.
    """
    found: set[str] = set()
    databases: set[str] = set()
    try:
        arrays = [array for array in open_reader().stored() if isinstance(array, zarr.Array)]
    except (TreeringError, OSError) as error:
        raise_if_momentary(error)
        if any(is_folder(store, posixpath.join(path, name)) for name in store.list(path)):
            raise ExistsError(
                f"{path}: expected a checkpoint to replace, found one that cannot be opened, so it is unknown what "
                f"is part of it: {error}; write to another path, or remove it yourself"
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
    """The bytes of all files in a folder."""
    total = 0
    for name in store.list(path):
        inner = posixpath.join(path, name)
        there = store.stat(inner)
        if there is not None and there.is_folder:
            total += 0 if store.is_link(inner) else folder_size(store, inner)
        elif there is not None:
            total += there.nbytes
    return total
