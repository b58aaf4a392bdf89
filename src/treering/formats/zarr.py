"""Zarr arrays, as plain files or in an OCDBT database, through TensorStore.

TensorStore does its own reading and writing, below the `Disk` that everything else goes through. All calls of it are
here. It fills in missing chunks unless it is told not to, believes sizes, and ends the process when there is no
memory for them; so sizes are checked first, against the files where that can be done.
"""

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from .. import _dtypes, stores
from .._sharding import Box, extent, intersect, slices, whole
from ..errors import CorruptError, TreeringError, UnsafeError, UnsupportedError
from ..stores.disk import read_file
from . import zarr_metadata
from .zarr_metadata import Layout, can_hold

__all__ = ["Folder", "Writer", "ZarrArray", "can_hold", "read", "write"]

Driver = Literal["zarr", "zarr3"]
_IN_FLIGHT = 256 << 20  # bytes of chunks that are read or written at a time; a larger chunk passes alone
_KEPT = 256 << 20  # bytes of decoded chunks kept of an array that is read in parts of chunks
_PROBED = 64 << 20  # bytes from which on it is asked first whether there is memory for them
_METADATA = 16 << 20  # bytes of an array's metadata that could be meant
_LISTED = 1000  # chunks in a database from which on it is asked for a list of them
_CONTEXT = {
    "cache_pool#nodes": {"total_bytes_limit": 64 << 20},
    "file_io_concurrency": {"limit": 32},
}
_DAMAGE = ("NOT_FOUND", "DATA_LOSS", "FAILED_PRECONDITION", "OUT_OF_RANGE", "INVALID_ARGUMENT")


class Folder:
    """A folder of zarr arrays: plain files or, with `ocdbt`, one OCDBT database."""

    def __init__(self, path: str, *, ocdbt: bool):
        import tensorstore as ts

        self.path, self.ocdbt = path, ocdbt
        self._partly: tuple[ZarrArray, Any] | None = None  # the array of which chunks were last read in part
        self.context = ts.Context(_CONTEXT)
        try:
            self.keys = ts.KvStore.open(_kvstore(path, ocdbt), context=self.context).result()
        except ValueError as error:
            raise _translated(error, path) from None

    def list(self, prefix: str = "") -> list[str]:
        """The keys of a database that start with a prefix. Raises `CorruptError` when it cannot be read."""
        import tensorstore as ts

        end = prefix.encode() + b"\xff" if prefix else b""
        try:
            found = self.keys.list(ts.KvStore.KeyRange(prefix, end)).result()
        except ValueError as error:
            raise _translated(error, self.path) from None
        return sorted(key.decode("utf-8", "backslashreplace") for key in found)

    def arrays(self, names: Sequence[str], driver: Driver) -> "list[ZarrArray]":
        """The arrays of these names. Their metadata is read at once. Raises `CorruptError` for those that lack it."""
        keys = [f"{name}/{zarr_metadata.FILES[driver]}" for name in names]
        found = self._metadata(keys) if self.ocdbt else map(self._metadata_file, keys)
        return [ZarrArray._of(self, name, driver, data) for name, data in zip(names, found, strict=True)]

    def place(self, key: str) -> str:
        """Where a key lies, for messages."""
        return os.path.join(self.path, key)

    def _metadata(self, keys: Sequence[str]) -> Iterator[bytes]:
        try:
            futures = [(key, self.keys.read(key)) for key in keys]
            for key, future in futures:
                found = future.result()
                if found.state != "value":
                    raise CorruptError(f"{self.place(key)}: expected an array's metadata, found nothing")
                yield found.value
        except ValueError as error:
            raise _translated(error, self.path) from None

    def _metadata_file(self, key: str) -> bytes:
        path = self.place(key)
        there = stores.DISK.stat(path)
        if there is None:
            raise CorruptError(f"{path}: expected an array's metadata, found nothing")
        if there.st_size > _METADATA:
            raise UnsafeError(f"{path}: {there.st_size} bytes, which cannot be meant as an array's metadata")
        return read_file(stores.DISK, path)


class ZarrArray:
    """A zarr array: see `treering.formats.foreign.Stored`. `shape`, and `dtype` as Treering's text.

    `path` is its folder or, with `base`, its name in the OCDBT database in that folder. Every chunk has to be there: a
    missing one is a `CorruptError` that names it, whatever the fill value. A box reads the chunks it touches.
    """

    layout: Layout

    def __init__(self, path: str, *, driver: Driver = "zarr", base: str | None = None):
        parent, name = os.path.split(os.path.normpath(path)) if base is None else (base, path.rstrip("/"))
        folder = Folder(parent, ocdbt=base is not None)
        (made,) = folder.arrays([name], driver)
        self.__dict__.update(made.__dict__)

    @classmethod
    def _of(cls, folder: Folder, name: str, driver: Driver, metadata: bytes) -> "ZarrArray":
        made = cls.__new__(cls)
        made.folder, made.name, made.driver = folder, name, driver
        made.layout = zarr_metadata.parse(metadata, driver, made.path)
        return made
