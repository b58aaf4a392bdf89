"""What formats that consist of zarr arrays have in common: reading them at once, writing leaves as such."""

import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .. import _dtypes
from .._catalogue import ArrayEntry, Entry
from .._sharding import Box, extent, in_slices, whole
from ..errors import CorruptError, UnsafeError
from ..stores.disk import Disk
from . import Reader, zarr
from .foreign import ForeignReader, Stored

_CHUNK = 16 << 20  # bytes
_RATIO = 1 << 16  # elements of an array for each byte of the files; zstd makes 32768 bytes of one at most
_FEW = 1 << 18  # chunks, of which each takes time even when it is left out
_MOST_DAMAGE = 10_000  # chunks of an array that are named one by one
_LEFT_OUT = 1 << 34  # elements for which there need not be a byte where chunks may be left out


class ZarrReader(ForeignReader):
    """A reader of arrays of which those that are zarr arrays are read at once.

    `nbytes` are those of all files. Raises `UnsafeError` for arrays larger than any compression makes of them.
    """

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
                if array.filled and array.cells > _FEW + nbytes:
                    raise UnsafeError(f"{path}: {name} claims {array.cells} chunks, which cannot all be left out")

    def maps(self, wish: bool | None) -> bool:
        return False

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, map: bool | None = None
    ) -> list[np.ndarray]:
        arrays = [self._arrays[entry.path] for entry, _ in wanted]
        boxes = [(array, box) for array, (_, box) in zip(arrays, wanted, strict=True) if isinstance(array, zarr.Array)]
        rest = [pair for array, pair in zip(arrays, wanted, strict=True) if not isinstance(array, zarr.Array)]
        found, others = iter(zarr.read(boxes)), iter(super().read(rest, verify=verify, map=map))
        return [next(found if isinstance(array, zarr.Array) else others) for array in arrays]

    def _damage_of(self, entry: ArrayEntry) -> Iterator[str]:
        array = self._arrays[entry.path]
        yield from _damage(array) if isinstance(array, zarr.Array) else super()._damage_of(entry)


def _damage(array: zarr.Array) -> Iterator[str]:
    """Reads everything and yields what is wrong, chunk by chunk where there is something."""
    seen: set[str] = set()
    for part, _ in array.split(whole(array.shape), zarr.IN_FLIGHT):
        try:
            array.read(part, False)
            continue
        except (CorruptError, OSError):
            pass
        for box, _ in array.split(part, 0):
            try:
                array.read(box, False)
            except (CorruptError, OSError) as error:
                if str(error) not in seen:
                    seen.add(str(error))
                    yield str(error)
            if len(seen) >= _MOST_DAMAGE:
                yield f"{array.path}: {len(seen)} chunks are damaged, and what comes after them was not looked at"
                return


def add_array(writer: zarr.Writer, name: str, entry: ArrayEntry, contents: Reader) -> Sequence[int]:
    """Writes an array in chunks that lie in one piece where it comes from; returns their shape."""
    first = next(in_slices(entry.shape, _dtypes.itemsize(entry.dtype), _CHUNK), ())
    chunks = [max(size, 1) for size in extent(first)] or [1] * len(entry.shape)

    def read_box(box: Box) -> np.ndarray:
        return contents.read([(entry, box)], verify=True)[0]

    writer.add(name, entry.shape, entry.dtype, read_box, chunks=chunks, compressor=None)
    return chunks


def add_number(writer: zarr.Writer, name: str, value: complex) -> None:
    """Writes a number of Python as an array without axes."""
    array = np.array(value)
    writer.add(name, (), _dtypes.to_text(array.dtype), lambda box: array, chunks=(), compressor=None)


def holds_arrays(disk: Disk, path: str) -> bool:
    """Whether a folder is a zarr array or a database of them, or consists of such folders and nothing else."""
    names = disk.list(path)
    if any(name in names for name in (".zarray", "zarr.json", zarr.DATABASE)):
        return True
    return bool(names) and all(holds_arrays(disk, os.path.join(path, name)) for name in names)


def folder_size(disk: Disk, path: str) -> int:
    """The bytes of all files in a folder."""
    total = 0
    for name in disk.list(path):
        inner = os.path.join(path, name)
        there = disk.stat(inner)
        if there is not None and stat.S_ISDIR(there.st_mode):
            total += 0 if os.path.islink(inner) else folder_size(disk, inner)
        elif there is not None:
            total += there.st_size
    return total
