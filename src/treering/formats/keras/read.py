"""Reads weights of Keras: HDF5 files, archives with one, and shards with their index.

HDF5 stores arrays in one run of bytes, or in chunks that the filters of h5py have packed.
"""

import logging
import math
import posixpath
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, full_box, slices
from ..._core.entries import ArrayEntry, Entry, lost_entry
from ..._core.leaf_paths import join_names
from ..._core.source import EVERYTHING, Problem, Share
from ...errors import CorruptError, UnsafeError, UnsupportedError
from ...stores.file_io import open_fetched, read_file
from ...stores.store import Blob, Store
from .._shared import strict_json
from .._shared.extents import Runs
from .._shared.pieces import Pieces
from .._shared.reader import ForeignReader, Stored, attempts, check_file
from .._shared.safety import check_inside
from .._shared.zips import damage_of, locate, open_zip
from ..safetensors.schema import path_of
from ..torch.archive import Storage
from .hdf5 import ADVICE, UNDEFINED, HdfArray, Section, leaves, parse

_WEIGHTS = "model.weights.h5"  # the file with the weights in an archive

_log = logging.getLogger("treering")
_MAX_JSON_BYTES = 64 << 20
_DEFLATE, _SHUFFLE, _CHECKSUM = 1, 2, 3
_FILTERS = {_DEFLATE: "gzip", _SHUFFLE: "shuffle", _CHECKSUM: "fletcher32"}
_OTHERS = {4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf", 32001: "blosc", 32015: "zstd"}
_MODULUS = 65535  # of Fletcher's checksum
_SUM_WORDS = 1 << 20  # that are added before the sums are reduced
_MAX_CHUNK_BYTES = (1 << 32) - 1  # HDF5's own limit
_FREE_CHUNK_BYTES = 64 << 20  # that any chunk may have; beyond that `_MAX_RATIO` for each stored byte
_MAX_RATIO = 10  # A part of a chunk needs all of it in memory, so the size of what is read limits nothing.


class _OpenedFile(NamedTuple):
    """An HDF5 file: its leaves, what else it has, and its checksum if it has one."""

    file: Blob
    entries: Sequence[Entry]
    arrays: Mapping[str, Stored]
    uncertain: frozenset[str]
    metadata: Mapping[str, Any]
    left_out: Sequence[str]
    storage: Storage | None = None


class KerasReader(ForeignReader):
    """Reads weights. `ambiguous_dtypes` lists arrays shown as uint8 whose dtype of one byte the file does not name.

    With `verify`, the first read compares the checksum of an archive. HDF5 has none.
    """

    expands = True  # chunks may be compressed, and several arrays may share the same bytes

    def __init__(self, path: str, opened: Sequence[_OpenedFile], nbytes: int = 0):
        self._storages = [one.storage for one in opened if one.storage]
        self.ambiguous_dtypes = frozenset[str]().union(*(one.uncertain for one in opened))
        if self.ambiguous_dtypes:
            _log.warning(
                "%s: Keras has stored %s without the dtype (float8 or others); restored as that of the template, or "
                "otherwise as bytes (uint8)",
                path,
                join_names(tuple(sorted(self.ambiguous_dtypes))),
            )
        entries = [entry for one in opened for entry in one.entries]
        metadata: dict[str, Any] = {}
        for one in opened:
            metadata |= one.metadata
        self.has_checksums = len(self._storages) == len(opened)
        super().__init__(
            "keras",
            path,
            entries,
            {name: array for one in opened for name, array in one.arrays.items()},
            metadata=metadata or None,
            nbytes=nbytes + sum(one.file.size for one in opened),
            left_out=[what for one in opened for what in one.left_out],
        )

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, mmap: bool | None = None
    ) -> list[np.ndarray]:
        for storage in self._storages if verify else ():
            storage.check()
        return super().read(wanted, verify=verify, mmap=mmap)

    def problems(self, share: Share = EVERYTHING) -> Any:
        for storage in self._storages:
            try:
                storage.check()
            except CorruptError as error:
                yield Problem(self.path, tuple(self.entries), None, str(error))
                return
        yield from super().problems(share)


def open_file(store: Store, path: str) -> KerasReader:
    """Opens a single HDF5 file."""
    return KerasReader(path, [_open(store, path)])


def open_archive(store: Store, path: str) -> KerasReader:
    """Opens the weights in a model of Keras (.keras). Its configuration becomes metadata."""
    file = open_fetched(store, path)
    metadata: dict[str, Any] = {}
    left_out: list[str] = []
    advice = f"unpack it, and open the {_WEIGHTS} in it"
    with damage_of(path, "a model of Keras", advice):
        archive = open_zip(file)
        members = {member.filename: member for member in archive.infolist()}
        if len(members) < len(archive.infolist()):
            raise CorruptError(f"{path}: two files in this archive have one name")
        room = min(file.size, _MAX_JSON_BYTES)  # Compressed or overlapping files could be larger together.
        for name, member in members.items():
            if name.endswith(".json") and member.file_size <= room:
                room -= member.file_size
                try:
                    metadata[name] = strict_json.parse(archive.read(member))
                    continue
                except strict_json.MALFORMED:
                    pass
            if name != _WEIGHTS:
                left_out.append(name)
        if _WEIGHTS not in members:
            raise UnsupportedError(
                f"{path}: expected {_WEIGHTS}, found {join_names((*members,))}; load it with Keras, and save it with "
                "model.save_weights('NAME.weights.h5')"
            )
        if members[_WEIGHTS].compress_type != zipfile.ZIP_STORED:
            raise UnsupportedError(f"{path}: expected {_WEIGHTS} uncompressed; {advice}")
        place = locate(file, 0, file.size, members[_WEIGHTS], path)
    one = _parsed(file, Section(file, f"{path}: {_WEIGHTS}", place.offset, place.nbytes))
    storage = Storage(file, place, f"{path}: {_WEIGHTS}")
    found = one._replace(metadata={**metadata, **one.metadata}, left_out=[*left_out, *one.left_out], storage=storage)
    return KerasReader(path, [found])


def open_index(store: Store, path: str) -> KerasReader:
    """Opens the files that an index (.weights.json) names. Raises `CorruptError` if one lacks what the index says."""
    data = read_file(store, path)
    try:
        index = strict_json.parse_typed(data, {"weight_map": dict[str, str | list[str]], "metadata": Any})
        places = {
            group.strip("/"): [names] if isinstance(names, str) else names
            for group, names in index["weight_map"].items()
        }
    except (KeyError, *strict_json.MALFORMED) as error:
        raise CorruptError(f"{path}: expected an index of Keras's weights: {error}") from None
    names = list(dict.fromkeys(name for some in places.values() for name in some))
    folder = posixpath.dirname(path)
    for name in names:
        check_inside(folder, name)
        if "/" in name:
            raise UnsafeError(f"{path}: expected names of files in its folder, found {name!r:.100}")
    files = [check_file(store, posixpath.join(folder, name), path) for name in names]
    found = dict(zip(names, attempts(store, files, lambda file: _open(store, file)), strict=True))
    opened: dict[str, _OpenedFile] = {}
    for name, one in found.items():
        if isinstance(one, CorruptError):
            raise one
        opened[name] = one
    for group, some in places.items():
        for name in some:
            if not any(entry.path.startswith(f"{path_of(group)}/") for entry in opened[name].entries):
                raise CorruptError(
                    f"{opened[name].file.path}: expected {group}, which {posixpath.basename(path)} places in this file"
                )
    _check_total(path, index.get("metadata"), list(opened.values()))
    return KerasReader(path, list(opened.values()), len(data))


def _check_total(path: str, metadata: Any, opened: Sequence[_OpenedFile]) -> None:
    """Logs a total size that the arrays do not have."""
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    arrays = [entry for one in opened for entry in one.entries if isinstance(entry, ArrayEntry)]
    found = sum(entry.nbytes / (8 if entry.dtype == "bool" else 1) for entry in arrays)  # Keras counts bits.
    if type(total) in (int, float) and total != found:
        _log.warning(
            "%s: its total_size is %d bytes, but the arrays in its files have %d; a file may be of another save",
            path,
            total,
            found,
        )


def _open(store: Store, path: str) -> _OpenedFile:
    file = open_fetched(store, path)
    return _parsed(file, Section(file, path, 0, file.size))


def _parsed(file: Blob, section: Section) -> _OpenedFile:
    contents = parse(section)
    entries: list[Entry] = []
    arrays: dict[str, Stored] = {}
    uncertain: list[str] = []
    for name, array in contents.arrays.items():
        path = path_of(name)
        try:
            arrays[path] = _stored(section, array, name)
        except UnsafeError:
            raise
        except CorruptError as error:
            entries.append(lost_entry(path, str(error)))
            continue
        entries.append(ArrayEntry(path, "numpy", array.kind.dtype, array.shape))
        if not array.kind.certain:
            uncertain.append(path)
    return _OpenedFile(file, entries, arrays, frozenset(uncertain), contents.attributes, contents.left_out)


def _stored(file: Section, array: HdfArray, name: str) -> Stored:
    if array.chunks is not None:
        return chunked(file, array, name)
    nbytes = math.prod(array.shape) * array.kind.stored.itemsize
    address = array.address if nbytes else 0
    if address == UNDEFINED:
        raise CorruptError(f"{file.name}: {name}: expected {nbytes} bytes, found none; HDF5 would show the fill value")
    if array.nbytes != nbytes:
        raise CorruptError(f"{file.name}: {name}: expected {nbytes} bytes, found {array.nbytes}")
    file.check(address, nbytes)
    dtype = dtypes.to_numpy(array.kind.dtype)
    return Runs.of([(file.file, file.begin + address, nbytes)], array.shape, array.kind.stored, dtype)


def chunked(file: Section, array: HdfArray, path: str) -> Pieces:
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
    found: dict[tuple[int, ...], _HdfChunk] = {}
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
        found[place] = _HdfChunk(file, where, array, chunk, address, nbytes, filters)
    expected = math.prod(-(-end // size) for end, size in zip(shape, chunk, strict=True))
    if len(found) != expected:
        raise CorruptError(f"{where}: expected {expected} chunks, found {len(found)}; HDF5 would show the fill value")
    boxes = [
        tuple((n, min(n + size, end)) for n, size, end in zip(place, chunk, shape, strict=True)) for place in found
    ]
    return Pieces([*zip(boxes, found.values(), strict=True)], dtypes.to_numpy(array.kind.dtype))


class _HdfChunk(NamedTuple):
    """A chunk of an array, to read; see `Stored`. All chunks have one size, also those that reach over an edge."""

    file: Section
    where: str
    array: HdfArray
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
