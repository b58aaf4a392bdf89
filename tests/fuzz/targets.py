"""The fuzzed readers: they may raise nothing but a `TreeringError` for any bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from treering import stores
from treering._core.boxes import full_box
from treering.errors import TreeringError
from treering.formats import dcp, equinox, fjformer, flax, keras, torch
from treering.formats._shared.pickles import read_pickle
from treering.formats._zarr import metadata
from treering.formats.safetensors import header as safetensors
from treering.formats.safetensors.read import open_files
from treering.formats.safetensors.schema import read_sidecar
from treering.formats.tensorflow import table
from treering.formats.tensorflow.table import read_header, read_tensor
from treering.formats.torch.tree import TorchLeaves
from treering.formats.treering import manifest
from treering.formats.treering.read import Reader

CORPUS = Path(__file__).parent / "corpus"
_MAX_ELEMENTS = 1 << 16  # elements of an array that is read


def _all_of(reader: Any) -> None:
    """Reads the values and the small arrays of an open checkpoint."""
    for entry in reader.entries.values():
        if not hasattr(entry, "shape"):
            entry.decode()
        elif np.prod(entry.shape, dtype=object) <= _MAX_ELEMENTS:
            reader.read([(entry, full_box(entry.shape))], mmap=False)


def _of_file(open: Callable[[str], Any]) -> Callable[[bytes, Path], None]:
    def target(data: bytes, folder: Path) -> None:
        path = folder / "x.eqx"  # Equinox recognizes files without records by this suffix
        path.write_bytes(data)
        _all_of(open(str(path)))

    return target


def _manifest(data: bytes, folder: Path) -> None:
    """Reads a manifest with a fitting checksum and no array files."""
    (folder / "treering.json").write_bytes(data + b',"xxh3":"' + manifest.xxh3(data).encode() + b'"}\n')
    manifest.summarize((folder / "treering.json").read_bytes(), "manifest").created_seconds()
    reader = Reader(stores.get(""), str(folder))
    for problem in reader.problems():
        str(problem)
    _all_of(reader)


def _header(data: bytes, folder: Path) -> None:
    """Reads the header of a safetensors file, with a fitting length."""
    header = safetensors.decode_header(len(data).to_bytes(8, "little") + data, "x")
    safetensors.check_side_by_side(header, header.size + 64, "x")
    read_sidecar(header.metadata)
    path = folder / "x.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(64))
    _all_of(open_files(stores.get(""), str(path), [str(path)]))


def _table(data: bytes, folder: Path) -> None:
    path = folder / "x.index"
    path.write_bytes(data)
    for key, value in table.items(stores.get("").open(str(path))):
        (read_tensor if key else read_header)(value, "x")


def _block(data: bytes, folder: Path) -> None:
    """Reads the contents of a block of a table, and of the messages in it, without checksums."""
    half = len(data) // 2
    for part in (data, table._decompress(data[:half], "x")):
        for key, value in table._entries(part, "x"):
            (read_tensor if key else read_header)(value, "x")


def _pickle(data: bytes, folder: Path) -> None:
    """Reads a pickle as the metadata of a distributed checkpoint, and as what a file of PyTorch contains."""
    (folder / "pickle").mkdir(exist_ok=True)
    (folder / "pickle" / ".metadata").write_bytes(data)
    try:
        TorchLeaves(read_pickle(data, "x"), None, "x")
    except TreeringError:
        pass
    _all_of(dcp.FORMAT.open(stores.get(""), str(folder / "pickle")))


def _zarr(data: bytes, folder: Path) -> None:
    metadata.parse(data, "zarr" if b'"zarr_format":2' in data else "zarr3", "x")


TARGETS: dict[str, Callable[[bytes, Path], None]] = {
    "manifest": _manifest,
    "header": _header,
    "flax": _of_file(lambda path: flax.FORMAT.open(stores.get(""), path)),
    "stream": _of_file(lambda path: fjformer.FORMAT.open(stores.get(""), path)),
    "records": _of_file(lambda path: equinox.FORMAT.open(stores.get(""), path)),
    "table": _table,
    "block": _block,
    "zarr": _zarr,
    "archive": _of_file(lambda path: torch.FORMAT.open(stores.get(""), path)),
    "pickle": _pickle,
    "hdf5": _of_file(lambda path: keras.FORMAT.open(stores.get(""), path)),
}
"""Fuzzed readers by name: each takes bytes, and a folder to write them to."""


def one(target: str, data: bytes, folder: Path) -> None:
    """Reads some bytes. Any error except a `TreeringError` is a bug."""
    try:
        TARGETS[target](data, folder)
    except TreeringError:
        pass
