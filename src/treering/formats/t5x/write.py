"""Writes T5X, version 3: small arrays in the state dict, large ones as gzipped zarr arrays in the same folder.

Python numbers become arrays without axes, which T5X can restore.
"""

import functools
import math
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ..._core import dtypes, skeleton
from ..._core.boxes import Box
from ..._core.calls import Call
from ..._core.entries import ArrayEntry, Entry, ValueEntry
from ..._core.layouts import Layout
from ..._core.leaf_paths import join, relative_to, split
from ..._core.source import Source
from ...stores.sequential import file_of_new_folder
from ...stores.store import Store
from .._shared import state_dict_write as writing
from .._shared.msgpack import pack
from .._shared.recognition import RecordingWriter, check
from .._zarr import metadata
from .._zarr.chunks import Chunks, assign_chunks, even_chunk_shape
from .._zarr.leaves import parts_of_arrays
from .._zarr.parallel_write import write_folder
from .._zarr.writer import ZarrWriter
from .read import open_state
from .schema import FILE, ORBAX_FILES, PLACEHOLDER, SPEC

MAX_INLINE_BYTES = 1 << 16  # bytes up to which an array is written into the state dict, as T5X does with scalars
CHUNK_BYTES = 64 << 20  # bytes of a chunk
_GZIP = {"id": "gzip", "level": 1}
_UNPARTITIONED = (
    "v_row",
    "v_col",
)  # of Adafactor: T5X never partitions these, and cannot restore them from files of their own
_NUMBERS = ("bool", "int", "float", "complex")  # Python types without the dtype that T5X expects
_MAX_NAME_BYTES = 200  # bytes of a file's name
_DATA_FILE = re.compile(r"train_ds-\d{3,}-of-\d{3,}\.(index|data-\d{5}-of-\d{5})")  # the state of TensorFlow's data


def write(
    store: Store,
    path: str,
    contents: Source,
    call: Call,
    layouts: Mapping[str, Layout],
    options: Mapping[str, Any],
    *,
    overwrite: bool,
) -> int:
    """Writes the folder of a step and returns its size in bytes."""
    specs = _values_like_specs(contents)

    def refused(leaf: str, entry: Entry) -> str | None:
        if any(relative_to(leaf, place) is not None for place in specs):
            return f"T5X takes a map with the keys {', '.join(SPEC)} for an array in a file; rename one"
        text = entry.type == "str" and isinstance(entry, ValueEntry) and PLACEHOLDER in entry.decode()
        return f"Orbax takes text with {PLACEHOLDER!r} for an array" if text else None

    writing.check("t5x", contents, options, refused)
    found = (entry for entry in contents.entries.values() if isinstance(entry, ArrayEntry))
    large = [entry for entry in found if _is_large(entry) or not _is_in_process_0(layouts.get(entry.path))]
    named = list(_names(large))
    names = {FILE, *ORBAX_FILES, *(name for _, name in named)}
    chunks = assign_chunks(call, large, layouts, CHUNK_BYTES, _shape)

    instead: dict[str, bytes] = {}

    def arrays(folder: str) -> list[ZarrWriter]:
        with ZarrWriter(store, folder, driver="zarr", ocdbt=False, call=call) as writer:
            for entry, name in named:
                instead[entry.path] = _add(writer, contents, entry, name, chunks[entry.path])
        return [writer]

    def rest(folder: str) -> None:
        for entry in contents.entries.values():
            if isinstance(entry, ValueEntry) and entry.type in _NUMBERS:
                instead[entry.path] = writing.number(entry.decode())
        with file_of_new_folder(store, posixpath.join(folder, FILE)) as opened:
            file = RecordingWriter(opened)
            writing.write(file, {"version": pack(3), "optimizer": writing.tree_of(contents)}, contents, instead)
            check(path, {posixpath.join(path, FILE): file}, "t5x")

    return write_folder(store, path, call, arrays, rest, overwrite=overwrite, owned=_owned, names=names)


def _values_like_specs(contents: Source) -> list[str]:
    """Returns the containers that a reader would take for specs of arrays."""
    places = skeleton.places(contents.entries)
    found = [place.rpartition("/")[0] for place in places if place.rpartition("/")[2] == SPEC[0]]
    return [one for one in found if all(join(one, key, root=not one) in places for key in SPEC)]


def splits(entry: ArrayEntry) -> bool:
    """Returns True if T5X can restore an array from its own files, so that several processes can write it."""
    return split(entry.path)[-1] not in _UNPARTITIONED and metadata.can_hold(entry.dtype)


def _is_in_process_0(layout: Layout | None) -> bool:
    """Returns True if process 0 has all of an array, so that it can write it into the state dict."""
    return layout is None or all(0 in holders for holders in layout.holders)


def _owned(store: Store, folder: str) -> set[str]:
    """Returns the files that T5X wrote for a step, including the state of the data, which belongs to this step only."""
    arrays = parts_of_arrays(store, folder, lambda: open_state(store, folder, posixpath.join(folder, FILE), None))
    return {FILE, *filter(_DATA_FILE.fullmatch, store.list(folder)), *arrays}


def _add(arrays: ZarrWriter, contents: Source, entry: ArrayEntry, name: str, chunks: Chunks) -> bytes:
    """Writes an array to its files; returns what stands for it in the state dict: a TensorStore spec in MessagePack."""
    read_box = functools.partial(_read_box, contents, entry)
    arrays.add(name, entry.shape, entry.dtype, read_box, chunks=chunks, compressor=_GZIP)
    spec = {
        "driver": "zarr",
        "dtype": entry.dtype,
        "kvstore": {"driver": "file", "path": f"{name}/"},
        "metadata": {"chunks": chunks.shape, "compressor": _GZIP, "shape": entry.shape},
    }
    return msgspec.msgpack.encode(spec)


def _shape(entry: ArrayEntry) -> list[int]:
    """Returns the shape of an array's chunks; one chunk if it is in files only because process 0 lacks parts of it."""
    if _is_large(entry):
        return even_chunk_shape(entry.shape, dtypes.itemsize(entry.dtype), CHUNK_BYTES)
    return [max(size, 1) for size in entry.shape]


def _is_large(entry: ArrayEntry) -> bool:
    """Returns True if an array is large enough for its own files, in chunks that are not tiny for lack of factors."""
    itemsize = dtypes.itemsize(entry.dtype)
    if not splits(entry) or not entry.shape or math.prod(entry.shape) * itemsize <= MAX_INLINE_BYTES:
        return False
    return math.prod(even_chunk_shape(entry.shape, itemsize, CHUNK_BYTES)) * itemsize >= MAX_INLINE_BYTES


def _read_box(contents: Source, entry: ArrayEntry, box: Box) -> np.ndarray:
    return contents.read([(entry, box)], verify=True)[0]


def _names(entries: Sequence[ArrayEntry]) -> Iterator[tuple[ArrayEntry, str]]:
    """Yields each array with a name: its path with dots or, if that is taken or not a valid file name, a number."""
    used = {
        name.lower() for name in (FILE, *ORBAX_FILES)
    }  # a folder with files of these names would be read as Orbax's
    for number, entry in enumerate(entries):
        name = ".".join(split(entry.path))
        usable = not any(c in name for c in "/\\\0") and name.strip(".") and len(name.encode()) <= _MAX_NAME_BYTES
        while not usable or name.lower() in used:  # some file systems ignore case
            name, usable = f"array-{number}", True
            number += len(entries)
        used.add(name.lower())
        yield entry, name
