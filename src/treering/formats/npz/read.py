"""Reads archives of NumPy: all headers when a file is opened, each array when it is requested."""

import contextlib
import logging
import math
import threading
import zipfile
from typing import IO

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, box_shape, byte_ranges
from ..._core.entries import ArrayEntry
from ..._core.leaf_paths import join_names
from ..._threads.forks import free_in_children
from ...errors import CorruptError, UnsupportedError
from ...stores.file_io import open_fetched
from ...stores.read_errors import reading
from ...stores.store import Store
from .._shared.extents import check_shape
from .._shared.npy import read_header
from .._shared.reader import ForeignReader, Stored
from .._shared.zips import damage_of, open_zip
from ..safetensors.schema import path_of

_SUFFIX = ".npy"
_log = logging.getLogger("treering")
_UNPACK_BYTES = 1 << 20  # bytes of an array that are unpacked at a time


class NpzReader(ForeignReader):
    """Reads an archive. `ambiguous_dtypes` lists arrays shown as uint8 whose dtype of one byte NumPy cannot name."""

    has_checksums = True
    expands = True  # arrays may be compressed, and several members may share the same bytes

    def __init__(self, store: Store, path: str):
        file = open_fetched(store, path)
        with reading(path), _damage_of(path):
            archive = open_zip(file)
            members = archive.infolist()
            arrays = {m.filename: _NpzArray(archive, m, path) for m in members if m.filename.endswith(_SUFFIX)}
        paths = {name: path_of(name.removesuffix(_SUFFIX)) for name in arrays}
        entries = [
            ArrayEntry(paths[m.filename], "numpy", *arrays[m.filename].kind) for m in members if m.filename in arrays
        ]
        stored: dict[str, Stored] = {paths[name]: array for name, array in arrays.items()}
        self.ambiguous_dtypes = frozenset(paths[name] for name, array in arrays.items() if not array.certain)
        if self.ambiguous_dtypes:
            _log.warning(
                "%s: NumPy has stored %s without the dtype (float8, int4 or others); restored as that of the template, "
                "or otherwise as bytes (uint8)",
                path,
                join_names(tuple(sorted(self.ambiguous_dtypes))),
            )
        others = [m.filename for m in members if m.filename not in arrays]
        super().__init__("npz", path, entries, stored, nbytes=file.size, left_out=others)


class _NpzArray:
    """Reads an array in an archive; see `Stored`. Checks its CRC-32 whenever it is read up to its end."""

    def __init__(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: str):
        self._name = f"{path}: {member.filename!r}"
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UnsupportedError(f"{self._name}: expected an array stored or deflated, found another compression")
        self._open = lambda: archive.open(member)
        with self._open() as file:
            record = read_header(lambda nbytes: _read(file, nbytes, self._name), self._name)
            self._begin = file.tell()
        check_shape(record.shape, self._name)
        self.kind, self.certain = (record.dtype, record.shape), record.certain
        self._stored, self._columns = record.stored, record.columns
        self._shape = record.shape[::-1] if record.columns else record.shape  # the shape as stored
        self._nbytes = math.prod(record.shape) * record.stored.itemsize
        if self._begin + self._nbytes != member.file_size:
            raise CorruptError(f"{self._name}: expected {self._begin + self._nbytes} bytes, found {member.file_size}")
        self._file: IO[bytes] | None = None  # stays open where the last read ended
        self._lock = free_in_children(threading.Lock())  # two reads must not share the position of the open file

    def can_map(self) -> bool:
        return False

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        box = box[::-1] if self._columns else box
        found = np.empty(box_shape(box), self._stored)
        target = found.reshape(-1).view(np.uint8).data if found.size else memoryview(b"")
        with self._lock, _damage_of(self._name):
            file = self._file or self._open()
            self._file = None  # stays None after an error
            for begin, end in byte_ranges(self._shape, box, self._stored.itemsize, 1) if found.size else ():
                file.seek(self._begin + begin)
                for at in range(begin, end, _UNPACK_BYTES):
                    part = _read(file, min(_UNPACK_BYTES, end - at), self._name)
                    target[: len(part)] = part
                    target = target[len(part) :]
                if end == self._nbytes and file.read(1):  # this read compares the CRC-32
                    raise CorruptError(f"{self._name}: expected the end of an array, found more")
            self._file = file
        native = found.astype(self._stored.newbyteorder("="), copy=False).view(dtypes.to_numpy(self.kind[0]))
        return np.asarray(native.T if self._columns else native, order="C")


def _read(file: IO[bytes], nbytes: int, name: str) -> bytes:
    data = file.read(nbytes)
    if len(data) < nbytes:
        raise CorruptError(f"{name}: expected {nbytes} more bytes, found {len(data)}; it is cut short")
    return data


def _damage_of(name: str) -> contextlib.AbstractContextManager[None]:
    return damage_of(name, "an archive of NumPy", "unpack it, and pack it with numpy.savez")
