"""Writing T5X, version 3: small arrays within the state dict, the others as gzipped zarr arrays beside it."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from .. import _dtypes
from .._catalogue import ArrayEntry
from .._paths import split
from ..stores.disk import Disk
from ..stores.whole import Appended, new_directory
from . import Reader, zarr, zarr_metadata
from . import statedict_write as writing
from .msgpack import pack
from .statedict import folder_size
from .t5x import FILE

INLINE = 1 << 16  # bytes of an array up to which it is written into the state dict, as T5X does with scalars
CHUNK = 64 << 20  # bytes
_GZIP = {"id": "gzip", "level": 1}
_SMALL = 64  # parts into which a dimension is cut at once; more only where there is no other way
_LONGEST = 200  # bytes of a file's name


def write(disk: Disk, path: str, contents: Reader, options: Mapping[str, Any], *, overwrite: bool) -> int:
    """Writes a step's folder and returns its size in bytes."""
    writing.check("t5x", contents, options)
    with new_directory(disk, path, overwrite=overwrite) as folder:
        arrays = zarr.Writer(folder, driver="zarr", ocdbt=False)
        specs: dict[str, bytes] = {}
        for entry, name in _named([one for one in contents.entries.values() if _is_large(one)]):
            chunks = chunk_shape(entry.shape, _dtypes.itemsize(entry.dtype))
            arrays.add(name, entry.shape, entry.dtype, _boxes(contents, entry), chunks=chunks, compressor=_GZIP)
            ...
