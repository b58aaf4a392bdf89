"""Reads and writes Equinox's files: all headers when a file is opened, each array when it is requested."""

import io
import json
import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, slice_boxes
from ..._core.describe import drop_code
from ..._core.entries import NO_ARRAY, ArrayEntry, Entry
from ..._core.leaf_paths import join_names
from ..._core.source import Source
from ...errors import CorruptError, UnsupportedError
from ...stores.file_io import open_fetched
from ...stores.store import Blob, Store, Writer
from .._shared.extents import Runs
from .._shared.npy import Record, read_header
from .._shared.reader import ForeignReader, Stored
from .._shared.recognition import new_file

_WINDOW_BYTES = 4 << 10  # bytes that are read at a time while looking for headers
_log = logging.getLogger("treering")
_TEXT = ("str", "bytes")
_SHOWN_BYTES = 1 << 16  # bytes after the line of JSON that show the format
_SLICE_BYTES = 64 << 20  # bytes of an array in memory at a time


class EquinoxReader(ForeignReader):
    """Lists the records as ``0``, ``1``, … in the file's order, which is that of the template's array-like leaves.

    `positional` states that. A template's leaf is array-like if it is an array, a NumPy scalar, or a Python bool, int,
    float or complex; the latter are arrays without axes in the file. Other leaves have no record.

    `ambiguous_dtypes` holds the paths of arrays that are listed as uint8, but whose dtype of one byte the file does not
    record: float8, int4 and others (float8_e5m2 is recorded). A template tells the dtype.
    """

    positional = True

    def __init__(self, store: Store, path: str, metadata: Any, begin: int):
        file = open_fetched(store, path)
        entries: list[ArrayEntry] = []
        arrays: dict[str, Stored] = {}
        ambiguous: list[str] = []
        for n, (offset, record) in enumerate(_records(file, begin)):
            name, shape = str(n), record.shape
            entries.append(ArrayEntry(name, "numpy", record.dtype, shape))
            run = file, offset, math.prod(shape) * record.stored.itemsize
            dtype = dtypes.to_numpy(record.dtype)
            if record.columns and len(shape) > 1:
                arrays[name] = _Columns(Runs.of([run], shape[::-1], record.stored, dtype))
            else:
                arrays[name] = Runs.of([run], shape, record.stored, dtype)
            if not record.certain:
                ambiguous.append(name)
        self.ambiguous_dtypes = frozenset(ambiguous)
        super().__init__("equinox", path, entries, arrays, metadata=metadata, nbytes=file.size)


class _Columns:
    """Reads an array stored in Fortran order."""

    def __init__(self, transposed: Runs):
        self._transposed = transposed

    def can_map(self) -> bool:
        return False

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        return np.ascontiguousarray(self._transposed.read(box[::-1], False).transpose())


def _records(file: Blob, position: int) -> Iterator[tuple[int, Record]]:
    """Yields the offset of each array's bytes, and the array's header."""
    window, start = b"", 0

    def take(size: int) -> bytes:
        nonlocal window, start, position
        if position + size > start + len(window):
            start = position
            window = file.read(position, min(max(size, _WINDOW_BYTES), file.size - position))
        if size > start + len(window) - position:
            raise CorruptError(f"{file.path}: expected {position + size} bytes, found {file.size}; it is cut short")
        position += size
        return window[position - size - start : position - start]

    number = 0
    while position < file.size:
        record = read_header(take, f"{file.path}: record {number}, at {position}")
        yield position, record
        position += math.prod(record.shape) * record.stored.itemsize
        number += 1
    if position > file.size:
        raise CorruptError(f"{file.path}: expected {position} bytes, found {file.size}; it is cut short")


def write(store: Store, path: str, contents: Source, *, overwrite: bool) -> int:
    """Writes a file; see `Equinox`. Returns its size in bytes."""
    problems = [
        f"  {path or '(root)'}: {why}" for path, entry in contents.entries.items() if (why := _problem(path, entry))
    ]
    if problems:
        head = "an Equinox file cannot hold these leaves; nothing was written:"
        raise UnsupportedError("\n".join([head, *problems]))
    if guessed := tuple(place or "(root)" for place in getattr(contents, "guessed", ())):
        _log.warning(
            "%s: the leaves in %s are in the order of their names, and this format stores only the order. A model with "
            "another order gets wrong leaves of equal shapes: restore into the model, and save that",
            path,
            join_names(guessed),
        )
    line = b"" if contents.metadata is None else json.dumps(contents.metadata).encode() + b"\n"
    with new_file(
        store, path, "equinox", overwrite=overwrite, begin=max(len(line), _SHOWN_BYTES) + _SHOWN_BYTES
    ) as file:
        file.write(line)
        for entry in contents.entries.values():
            if isinstance(entry, ArrayEntry):
                dtype = dtypes.to_numpy(entry.dtype)
                file.write(_header(dtype, entry.shape))
                for box in slice_boxes(entry.shape, dtype.itemsize, _SLICE_BYTES):
                    _append(file, contents.read([(entry, box)], verify=True)[0])
            elif entry.type not in (*NO_ARRAY, *_TEXT):
                value = np.asarray(entry.decode())
                file.write(_header(value.dtype, ()))
                _append(file, value)
    if text := [leaf or "(root)" for leaf, entry in contents.entries.items() if entry.type in _TEXT]:
        _log.info("%s: left out, because Equinox takes text and bytes from the template: %s", path, ", ".join(text))
    return file.size


def _problem(path: str, entry: Entry) -> str | None:
    """Returns the reason why Equinox could not read a leaf back; None if it can."""
    if isinstance(entry, ArrayEntry):
        if entry.type == "key":
            return f"typed PRNG keys; store jax.random.key_data(key), or {drop_code(path)}"
        dtype = dtypes.to_numpy(entry.dtype)
        known = dtype.kind in "biufcSUmM" and dtype.str != "<f1"
        return None if known or entry.dtype == "bfloat16" else f"{entry.dtype}, which Equinox cannot read; cast it"
    if entry.type == "int" and not -(1 << 63) <= entry.decode() < 1 << 64:
        return "an int of more than 64 bits"
    return None


def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(text, {"descr": dtype.str, "fortran_order": False, "shape": shape})
    return text.getvalue()


def _append(file: Writer, array: np.ndarray) -> None:
    if array.size:
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
