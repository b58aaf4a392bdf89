"""Reading safetensors files, single or in shards with an index."""

import math
import os
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from .. import _dtypes
from .._catalogue import ArrayEntry, Entry, decode_float
from .._sharding import Box, slices, whole
from ..errors import CorruptError, UnsafeError, UnsupportedError
from ..stores.disk import Disk, read_file
from . import Reader
from .foreign import ForeignReader, Stored
from .runs import File, Runs, check_shape, mapped_once
from .safetensors import Header, check_side_by_side, decode_header, header_size
from .safetensors_files import path_of, read_beside

_NAMES = {code: name for name, (code, _) in _dtypes.SAFETENSORS.items()}
_BITS = {code: 8 * size for code, size in _dtypes.SAFETENSORS.values()} | {"F4": 4}
_NAMES["F4"] = "float4_e2m1fn"


class _Opened(NamedTuple):
    file: File
    header: Header


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def open_file(disk: Disk, path: str, main: str) -> Reader:
    """A single file."""
    found = _open(disk, main)
    return _Reader(path, [found], ((key, found) for key in found.header.tensors))


def open_shards(disk: Disk, path: str, index: str) -> Reader:
    """The files beside an index."""
    try:
        weights = msgspec.json.decode(read_file(disk, index), type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{index}: not an index of safetensors files: {error}") from None
    files: dict[str, _Opened] = {}
    for name in dict.fromkeys(weights.values()):
        if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
            raise UnsafeError(f"{index}: {name!r} is not the name of a file beside it")
        place = os.path.join(os.path.dirname(index), name)
        there = disk.stat(place)
        if there is None or not stat.S_ISREG(there.st_mode):
            raise CorruptError(f"{place}: expected the file that {os.path.basename(index)} names, found nothing")
        files[name] = _open(disk, place)
    for key, name in weights.items():
        if key not in files[name].header.tensors:
            raise CorruptError(f"{files[name].file.path}: expected the tensor {key!r}, which the index says is here")
    tensors = [(key, files[name]) for key, name in weights.items()]
    # What no index names is there all the same; of several files that have a key, the index says which one counts.
    tensors += [(key, found) for found in files.values() for key in found.header.tensors if key not in weights]
    return _Reader(path, list(files.values()), tensors)


def _open(disk: Disk, path: str) -> _Opened:
    file = File(disk, path)
    size = header_size(file.read(0, min(8, file.size)), file.size, path)
    header = decode_header(file.read(0, size), path)
    check_side_by_side(header, file.size, path)
    return _Opened(file, header)


class _Place(NamedTuple):
    """Where an array lies; `plain` says that its bytes are an array as they lie there."""

    file: File
    offset: int
    nbytes: int
    dtype: np.dtype
    shape: tuple[int, ...]
    plain: bool


class _Arrays(dict[str, Stored]):
    """The arrays as they are read where they are no views."""

    def __init__(self, places: Mapping[str, _Place]):
        self._places = places

    def __missing__(self, path: str) -> Stored:
        place = self._places[path]
        run = place.file, place.offset, place.nbytes
        if place.dtype.name == "float4_e2m1fn":
            return _Nibbles(Runs([run], (*place.shape[:-1], place.shape[-1] // 2), np.uint8))
        return Runs([run], place.shape, place.dtype.newbyteorder("<"), place.dtype)


class _Nibbles:
    """An array of four-bit floats, two in a byte, the first in the lower half; the size of the last axis is even."""

    def __init__(self, runs: Runs):
        self._runs = runs

    def can_map(self) -> bool:
        return False

    def read(self, box: Box, map: bool) -> np.ndarray:
        start, stop = box[-1]
        pairs = self._runs.read((*box[:-1], (start // 2, -(-stop // 2))), False)
        both = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], 2 * pairs.shape[-1])
        own = both[..., start % 2 : start % 2 + stop - start]
        return np.ascontiguousarray(own).view(_dtypes.to_numpy("float4_e2m1fn"))


class _Reader(ForeignReader):
    """Arrays that may be mapped are views of one mapping of their file for each call."""

    def __init__(self, path: str, files: Sequence[_Opened], tensors: Iterable[tuple[str, _Opened]]):
        entries: list[Entry] = []
        self._places: dict[str, _Place] = {}
        for key, found in tensors:
            place = _place(key, found)
            entry = ArrayEntry(path_of(key), "numpy", _NAMES[found.header.tensors[key].dtype], place.shape)
            entries.append(entry)
            self._places[entry.path] = place
        beside = read_beside({k: text for found in reversed(files) for k, text in found.header.metadata.items()})
        super().__init__(
            "safetensors",
            path,
            entries,
            _Arrays(self._places),
            step=beside.step,
            metrics={name: decode_float(value) for name, value in beside.metrics.items()},
            metadata=beside.metadata,
            nbytes=sum(found.file.size for found in files),
        )

    def maps(self, wish: bool | None) -> bool:
        return all(place.plain and place.file.local for place in self._places.values()) if wish is None else wish

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, map: bool | None = None
    ) -> list[np.ndarray]:
        with mapped_once():
            return [self._read(entry.path, box, map) for entry, box in wanted]

    def _read(self, path: str, box: Box, wish: bool | None) -> np.ndarray:
        place = self._places[path]
        if not (place.plain and place.nbytes and (place.file.local if wish is None else wish)):
            return self._arrays[path].read(box, False)
        array = np.ndarray(place.shape, place.dtype, place.file.mapped(), place.offset)
        return array if box == whole(place.shape) else array[slices(box, whole(place.shape))]


def _place(key: str, found: _Opened) -> _Place:
    """Where a tensor lies. Raises `UnsafeError` when that has not the size of its shape."""
    tensor = found.header.tensors[key]
    shape, (begin, end), bits = tensor.shape, tensor.data_offsets, _BITS.get(tensor.dtype)
    if bits is None or (bits < 8 and (not shape or shape[-1] % 2)):
        raise UnsupportedError(f"{found.file.path}: {key!r} is {tensor.dtype}{list(shape)}, which cannot be read here")
    if bits * math.prod(shape) != 8 * (end - begin):
        raise UnsafeError(f"{found.file.path}: {key!r} has not the size of its shape, {tensor.dtype}{list(shape)}")
    if begin == end or len(shape) > 8:
        check_shape(shape, found.file.path)
    offset, dtype = found.header.size + begin, _dtypes.to_numpy(_NAMES[tensor.dtype])
    plain = bits >= 8 and offset % dtype.alignment == 0 and sys.byteorder == "little"
    return _Place(found.file, offset, end - begin, dtype, shape, plain)
