"""Reads arrays that HDF5 stores in chunks, packed by the filters of h5py."""

import math
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, full_box, slices
from ...errors import CorruptError, UnsafeError, UnsupportedError
from .._shared.pieces import Pieces
from .hdf5 import ADVICE, UNDEFINED, Array, Section, leaves

_DEFLATE, _SHUFFLE, _CHECKSUM = 1, 2, 3
_FILTERS = {_DEFLATE: "gzip", _SHUFFLE: "shuffle", _CHECKSUM: "fletcher32"}
_OTHERS = {4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf", 32001: "blosc", 32015: "zstd"}
_MODULUS = 65535  # of Fletcher's checksum
_SUM_WORDS = 1 << 20  # that are added before the sums are reduced
_MAX_CHUNK_BYTES = (1 << 32) - 1  # HDF5's own limit
_FREE_CHUNK_BYTES = 64 << 20  # that any chunk may have; beyond that `_MAX_RATIO` for each stored byte
_MAX_RATIO = 10  # A part of a chunk needs all of it in memory, so the size of what is read limits nothing.


def chunked(file: Section, array: Array, path: str) -> Pieces:
    """Opens an array in chunks. Raises `CorruptError` if a chunk is missing.

    Raises `UnsupportedError` for filters that are not read here, and `UnsafeError` for a chunk that expands too much.
    """
    shape, chunk = array.shape, array.chunks or ()
    where = f"{file.name}: {path}"
    if other := [number for number in array.filters if number not in _FILTERS]:
        names = ", ".join(_OTHERS.get(number, f"filter {number}") for number in other)
        raise UnsupportedError(
            f"{where}: expected chunks packed by {', '.join(_FILTERS.values())}, found {names}; {ADVICE}"
        )
    if len(set(array.filters)) < len(array.filters):  # Each could make the chunk larger once more.
        raise CorruptError(f"{where}: expected each filter once, found {list(array.filters)}")
    chunk_bytes = math.prod(chunk) * array.kind.stored.itemsize
    if min(chunk, default=0) < 1 or chunk_bytes > _MAX_CHUNK_BYTES:
        raise CorruptError(f"{where}: expected the shape of a chunk, found {list(chunk)}")
    found: dict[tuple[int, ...], _Chunk] = {}
    key_form = f"<II{len(shape) + 1}Q"
    index = leaves(file, array.address, 1, struct.calcsize(key_form), set()) if array.address != UNDEFINED else ()
    for key, address in index:
        nbytes, skipped, *offsets, _ = struct.unpack(key_form, key)
        place = tuple(offsets)
        if place in found or any(n % size or n >= end for n, size, end in zip(place, chunk, shape, strict=True)):
            raise CorruptError(f"{where}: expected one chunk at {list(place)} on a grid of {list(chunk)}")
        file.check(address, nbytes)
        if chunk_bytes > max(_FREE_CHUNK_BYTES, _MAX_RATIO * nbytes):
            raise UnsafeError(
                f"{where}: expected chunks of at most {_MAX_RATIO} times the bytes that are stored, found "
                f"{chunk_bytes} bytes in {nbytes}; if you trust this file, {ADVICE}"
            )
        filters = tuple(number for n, number in enumerate(array.filters) if not skipped >> n & 1)
        found[place] = _Chunk(file, where, array, chunk, address, nbytes, filters)
    expected = math.prod(-(-end // size) for end, size in zip(shape, chunk, strict=True))
    if len(found) != expected:
        raise CorruptError(f"{where}: expected {expected} chunks, found {len(found)}; HDF5 would show the fill value")
    boxes = [
        tuple((n, min(n + size, end)) for n, size, end in zip(place, chunk, shape, strict=True)) for place in found
    ]
    return Pieces([*zip(boxes, found.values(), strict=True)], dtypes.to_numpy(array.kind.dtype))


class _Chunk(NamedTuple):
    """A chunk of an array, to read; see `Stored`. All chunks have one size, also those that reach over an edge."""

    file: Section
    where: str
    array: Array
    shape: tuple[int, ...]
    address: int
    nbytes: int
    filters: tuple[int, ...]

    def can_map(self) -> bool:
        return False

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        stored = self.array.kind.stored
        expected = math.prod(self.shape) * stored.itemsize
        data = self.file.file.read(self.file.begin + self.address, self.nbytes)
        try:
            for number in reversed(self.filters):
                data = _UNPACK[number](data, expected, stored.itemsize)
        except (ValueError, zlib.error) as error:
            raise CorruptError(f"{self.where}: the bytes of a chunk are not what was saved: {error}") from None
        if len(data) != expected:
            raise CorruptError(f"{self.where}: expected a chunk of {expected} bytes, found {len(data)}")
        array = np.frombuffer(data, stored).reshape(self.shape)[slices(box, full_box(self.shape))]
        return array.astype(stored.newbyteorder("="), order="C").view(dtypes.to_numpy(self.array.kind.dtype))


def _inflate(data: bytes, expected: int, itemsize: int) -> bytes:
    unpacker = zlib.decompressobj()
    found = unpacker.decompress(data, expected + 4)  # A checksum may follow the array.
    if not unpacker.eof:
        raise ValueError(f"expected a stream that ends within {expected} bytes")
    return found


def _unshuffle(data: bytes, expected: int, itemsize: int) -> bytes:
    nbytes = len(data) // itemsize * itemsize
    planes = np.frombuffer(data, np.uint8, nbytes).reshape(itemsize, -1)
    return planes.T.tobytes() + data[nbytes:]


def _without_checksum(data: bytes, expected: int, itemsize: int) -> bytes:
    if len(data) < 4:
        raise ValueError("expected a checksum")
    body, found = data[:-4], struct.unpack("<HH", data[-4:])
    words = np.frombuffer(body + b"\0" * (len(body) % 2), ">u2").astype(np.uint64)
    first = second = 0
    for at in range(0, len(words), _SUM_WORDS):
        part = words[at : at + _SUM_WORDS]
        weights = np.arange(len(part), 0, -1, dtype=np.uint64)
        second = (second + len(part) * first + int((part * weights).sum())) % _MODULUS
        first = (first + int(part.sum())) % _MODULUS
    if [number % _MODULUS for number in found] != [first, second]:
        raise ValueError("their checksum differs")
    return body


_UNPACK: dict[int, Callable[[bytes, int, int], bytes]] = {
    _DEFLATE: _inflate,
    _SHUFFLE: _unshuffle,
    _CHECKSUM: _without_checksum,
}
