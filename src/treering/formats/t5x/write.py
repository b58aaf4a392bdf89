"""Writing T5X, version 3: small arrays within the state dict, the others as gzipped zarr arrays beside it.

Numbers of Python become arrays without axes, which T5X can restore.
"""

import functools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box
from ..._core.entries import ArrayEntry, ValueEntry
from ..._core.leaf_paths import split
from ..._core.source import Source
from ...errors import TreeringError
from ...stores.sequential import file_of_new_folder
from ...stores.store import Store
from .._shared import state_dict_write as writing
from .._shared.msgpack import pack
from .._zarr import array, metadata
from .._zarr.leaves import folder_size, parts_of_arrays
from .read import open_state
from .schema import FILE, OF_ORBAX

INLINE = 1 << 16  # bytes of an array up to which it is written into the state dict, as T5X does with scalars
CHUNK = 64 << 20  # bytes
_GZIP = {"id": "gzip", "level": 1}
_MAX_PARTS = 64  # parts into which a dimension is cut at once; more only where there is no other way
_WHOLE = ("v_row", "v_col")  # of Adafactor, which T5X never partitions, and cannot restore from files of their own
_NUMBERS = ("bool", "int", "float", "complex")  # of Python, which lack the dtype that T5X asks for
_LONGEST = 200  # bytes of a file's name
_DATA = re.compile(r"train_ds-\d{3,}-of-\d{3,}\.(index|data-\d{5}-of-\d{5})")  # of TensorFlow


def write(store: Store, path: str, contents: Source, options: Mapping[str, Any], *, overwrite: bool) -> int:
    """Writes a step's folder and returns its size in bytes."""
    writing.check("t5x", contents, options)
    large = [entry for entry in contents.entries.values() if isinstance(entry, ArrayEntry) and _is_large(entry)]
    named = list(_names(large))
    names = {FILE, *OF_ORBAX, *(name for _, name in named)}
    with store.new_folder(path, overwrite=overwrite, owned=_owned, names=names) as folder:
        arrays = array.Writer(store, folder, driver="zarr", ocdbt=False)
        try:
            instead = {entry.path: _add(arrays, contents, entry, name) for entry, name in named}
            arrays.close()
        except BaseException:
            _settle(arrays)
            raise
        for entry in contents.entries.values():
            if isinstance(entry, ValueEntry) and entry.type in _NUMBERS:
                instead[entry.path] = writing.number(entry.decode())
        with file_of_new_folder(store, os.path.join(folder, FILE)) as file:
            writing.write(file, {"version": pack(3), "optimizer": writing.tree_of(contents)}, contents, instead)
        return folder_size(store, folder)


def _owned(store: Store, folder: str) -> set[str]:
    """The files that T5X has written for a step, the state of its data included, which belongs to that step alone."""
    arrays = parts_of_arrays(store, folder, lambda: open_state(store, folder, os.path.join(folder, FILE), None))
    return {FILE, *filter(_DATA.fullmatch, store.list(folder)), *arrays}


def _add(arrays: array.Writer, contents: Source, entry: ArrayEntry, name: str) -> bytes:
    """Writes an array beside the state dict; returns its placeholder there, a TensorStore spec in MessagePack."""
    chunks = chunk_shape(entry.shape, dtypes.itemsize(entry.dtype))
    read_box = functools.partial(_read_box, contents, entry)
    arrays.add(name, entry.shape, entry.dtype, read_box, chunks=chunks, compressor=_GZIP)
    spec = {
        "driver": "zarr",
        "dtype": entry.dtype,
        "kvstore": {"driver": "file", "path": f"{name}/"},
        "metadata": {"chunks": chunks, "compressor": _GZIP, "shape": entry.shape},
    }
    return msgspec.msgpack.encode(spec)


def _settle(arrays: array.Writer) -> None:
    """Waits for writes that are under way, which would otherwise go on in a folder that is being removed."""
    while True:
        try:
            return arrays.close()
        except (TreeringError, OSError):
            pass  # the first error is raised already


def chunk_shape(shape: Sequence[int], itemsize: int) -> list[int]:
    """The shape of chunks of at most `CHUNK` bytes that divide an array evenly, its largest dimension first."""
    chunk = list(shape)
    while math.prod(chunk) * itemsize > CHUNK and max(chunk) > 1:
        factors = [_least_factor(size) for size in chunk]
        axis = max(range(len(chunk)), key=lambda axis: (1 < factors[axis] <= _MAX_PARTS, chunk[axis]))
        chunk[axis] //= factors[axis]
    return chunk


def _least_factor(number: int) -> int:
    """The least prime factor; 1 of 1."""
    return next((n for n in range(2, math.isqrt(number) + 1) if number % n == 0), number)


def _is_large(entry: ArrayEntry) -> bool:
    """Whether an array gets files of its own; not for chunks that would be tiny because a dimension has no factors."""
    if split(entry.path)[-1] in _WHOLE:
        return False
    itemsize = dtypes.itemsize(entry.dtype)
    if math.prod(entry.shape) * itemsize <= INLINE or not entry.shape or not metadata.can_hold(entry.dtype):
        return False
    return math.prod(chunk_shape(entry.shape, itemsize)) * itemsize >= INLINE


def _read_box(contents: Source, entry: ArrayEntry, box: Box) -> np.ndarray:
    return contents.read([(entry, box)], verify=True)[0]


def _names(entries: Sequence[ArrayEntry]) -> Iterator[tuple[ArrayEntry, str]]:
    """The arrays, each with a name: its path with dots or, where that is taken or cannot be a file's, a number."""
    used = {FILE}
    for number, entry in enumerate(entries):
        name = ".".join(split(entry.path))
        usable = not any(c in name for c in "/\\\0") and name.strip(".") and len(name.encode()) <= _LONGEST
        while not usable or name.lower() in used:  # some file systems do not tell cases apart
            name, usable = f"array-{number}", True
            number += len(entries)
        used.add(name.lower())
        yield entry, name
