"""Writes Equinox's files."""

import io
import json
import logging

import numpy as np

from ..._core import dtypes
from ..._core.boxes import slice_boxes
from ..._core.entries import NO_ARRAY, ArrayEntry, Entry
from ..._core.leaf_paths import join_names
from ..._core.source import Source
from ...errors import UnsupportedError
from ...stores.store import Store, Writer
from .._shared.recognition import new_file
from .schema import NAME

_log = logging.getLogger("treering")
_TEXT = ("str", "bytes")
_SHOWN_BYTES = 1 << 16  # bytes after the line of JSON that show the format
_SLICE_BYTES = 64 << 20  # bytes of an array in memory at a time


def write(store: Store, path: str, contents: Source, *, overwrite: bool) -> int:
    """Writes a file; see `Equinox`. Returns its size in bytes."""
    problems = [f"  {path or '(root)'}: {why}" for path, entry in contents.entries.items() if (why := _problem(entry))]
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
    with new_file(store, path, NAME, overwrite=overwrite, begin=max(len(line), _SHOWN_BYTES) + _SHOWN_BYTES) as file:
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


def _problem(entry: Entry) -> str | None:
    """Returns the reason why Equinox could not read a leaf back; None if it can."""
    if isinstance(entry, ArrayEntry):
        if entry.type == "key":
            return "typed PRNG keys; store jax.random.key_data(key), or drop it by a rule"
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
