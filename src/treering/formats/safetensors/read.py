"""Reads safetensors files, single or in shards with an index."""

import os
import posixpath
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..._core import dtypes
from ..._core.entries import ArrayEntry, Entry, lost_entry
from ..._core.source import Source
from ..._core.values import decode_float
from ..._threads.python_gc import gc_paused
from ...errors import CorruptError, UnsafeError, UnsupportedError
from ...stores.file_io import open_fetched
from ...stores.store import Blob, Store
from .._shared.extents import Layout, Runs, layout
from .._shared.reader import ForeignReader, Stored, attempt, attempts, check_file
from . import nibbles
from .folder import weights_of
from .header import Header, check_side_by_side, decode_header, header_size
from .schema import path_of, read_sidecar

_NAMES = {code: name for name, (code, _) in dtypes.SAFETENSORS.items()}
_NAMES[nibbles.CODE] = nibbles.DTYPE


class _Opened(NamedTuple):
    file: Blob
    header: Header


def open_files(store: Store, path: str, files: Sequence[str]) -> Source:
    """Opens a single file, or several that form one checkpoint."""
    with gc_paused():
        found = [_open(store, file) for file in files]
        return _reader(path, found, ((key, one) for one in found for key in one.header.tensors))


def open_shards(store: Store, path: str, index: str) -> Source:
    """Opens the files that an index names, in its folder."""
    weights = weights_of(store, index)
    there = store.stat(index)
    size = 0 if there is None else there.nbytes
    files: dict[str, _Opened] = {}
    damage: dict[str, str] = {}
    names = list(dict.fromkeys(weights.values()))
    paths = [posixpath.join(os.path.dirname(index), name) for name in names]
    there_are = [attempt(lambda place=place: check_file(store, place, index)) for place in paths]
    for name, found in zip(names, attempts(store, there_are, lambda place: _open(store, place)), strict=True):
        if isinstance(found, CorruptError):
            damage[name] = str(found)
        else:
            files[name] = found
    tensors: list[tuple[str, _Opened | str]] = []
    for key, name in weights.items():
        if name in files and key not in files[name].header.tensors:
            place = files[name].file.path
            tensors.append((key, f"{place}: expected the tensor {key!r}, which the index places in this file"))
        else:
            tensors.append((key, files[name] if name in files else damage[name]))
    # Tensors that no index names are read as well. If several files have a key, the index decides which file is used.
    tensors += [(key, found) for found in files.values() for key in found.header.tensors if key not in weights]
    with gc_paused():
        return _reader(path, list(files.values()), tensors, size)


def _open(store: Store, path: str) -> _Opened:
    file = open_fetched(store, path)
    size = header_size(file.read(0, min(8, file.size)), file.size, path)
    header = decode_header(file.read(0, size), path)
    check_side_by_side(header, file.size, path)
    return _Opened(file, header)


def _reader(
    path: str, files: Sequence[_Opened], tensors: Iterable[tuple[str, _Opened | str]], index: int = 0
) -> Source:
    """Builds the reader of tensors, each with its file or the reason why it cannot be read.

    `index` is the size of the index in bytes.
    """
    entries: dict[str, Entry] = {}
    arrays: dict[str, Stored] = {}
    kinds: dict[tuple[str, tuple[int, ...]], tuple[str, Layout]] = {}
    for key, found in tensors:
        place = path_of(key) if "~" in key else key
        if place in entries:
            raise CorruptError(f"{path}: expected one leaf at {place}, found {_holders(place, files)}")
        if isinstance(found, str):
            entries[place] = lost_entry(place, found)
            continue
        tensor = found.header.tensors[key]
        begin, end = tensor.data_offsets
        kind = kinds.get((tensor.dtype, tensor.shape))
        if kind is None:
            kind = kinds[tensor.dtype, tensor.shape] = _kind(tensor.dtype, tensor.shape, f"{found.file.path}: {key!r}")
        dtype, about = kind
        if about.nbytes != end - begin:
            raise UnsafeError(
                f"{found.file.path}: {key!r}: expected {about.nbytes} bytes for {tensor.dtype}{list(tensor.shape)}, "
                f"found {end - begin}"
            )
        entries[place] = ArrayEntry(place, "numpy", dtype, tensor.shape)
        runs = Runs(((found.file, found.header.size + begin, about.nbytes),), about)
        arrays[place] = nibbles.Nibbles(runs) if dtype == nibbles.DTYPE else runs
    sidecar = read_sidecar({k: text for found in reversed(files) for k, text in found.header.metadata.items()})
    return ForeignReader(
        "safetensors",
        path,
        list(entries.values()),
        arrays,
        step=sidecar.step,
        metrics={name: decode_float(value) for name, value in sidecar.metrics.items()},
        metadata=sidecar.metadata,
        nbytes=index + sum(found.file.size for found in files),
    )


def _holders(place: str, files: Sequence[_Opened]) -> str:
    return " and ".join(
        f"{key!r} in {os.path.basename(one.file.path)}"
        for one in files
        for key in one.header.tensors
        if path_of(key) == place
    )


def _kind(code: str, shape: tuple[int, ...], name: str) -> tuple[str, Layout]:
    """Returns the dtype of a tensor, and the layout of its data: bytes if two elements share one."""
    dtype = _NAMES.get(code)
    if dtype is None or (dtype == nibbles.DTYPE and not nibbles.is_paired(shape)):
        raise UnsupportedError(f"{name} is {code}{list(shape)}, which Treering cannot read")
    if dtype == nibbles.DTYPE:
        return dtype, layout((*shape[:-1], shape[-1] // 2), np.uint8, None, name)
    stored = dtypes.to_numpy(dtype)
    return dtype, layout(shape, stored.newbyteorder("<"), stored, name)
