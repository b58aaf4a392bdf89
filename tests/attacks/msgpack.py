"""Attacks on the MessagePack of Flax, FJFormer and T5X: structures larger than the file, and false arrays."""

import gzip
import json
import pickle
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from . import CANARY, OUTSIDE, Verdict, add
from .subjects import SUBJECTS, write_zarr


def _array(shape: Any, dtype: Any, data: Any, code: int = 1) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb([shape, dtype, data], use_bin_type=True))


def _chunked(shape: Any, chunks: Any) -> dict[str, Any]:
    return {"__msgpack_chunked_array__": True, "shape": shape, "chunks": chunks}


_GOOD = _array([4], "float32", bytes(16))
_LEAVES: list[tuple[str, str, Any, Verdict]] = [
    ("a shape larger than the bytes", "reads past them", _array([5], "float32", bytes(16)), "refused"),
    ("a shape whose product overflows", "fits in 64 bits", _array([2**32, 2**32, 4], "float32", bytes(16)), "refused"),
    ("an axis below zero", "is any size", _array([-2, -2], "float32", bytes(16)), "refused"),
    ("an axis of 2^64 - 1", "overflows", _array([2**64 - 1], "float32", bytes(16)), "refused"),
    ("an empty array of 2^63 rows", "overflows", _array([0, 2**63], "float32", b""), "refused"),
    ("65 axes", "NumPy has no such arrays", _array([1] * 65, "float32", bytes(4)), "refused"),
    ("an axis that is true", "is a number, too", _array([True, 4], "float32", bytes(16)), "refused"),
    ("a dtype of objects", "makes pointers of bytes", _array([2], "object", bytes(16)), "refused"),
    ("a structured dtype", "makes pointers of bytes", _array([1], "O,O", bytes(16)), "refused"),
    ("a dtype of gigabytes", "is allocated", _array([0], "str999999999", b""), "harmless"),
    ("a dtype of no bytes", "divides by zero", _array([2**40], "bytes0", b""), "harmless"),
    ("a payload that is no array", "is unpacked", msgpack.ExtType(1, msgpack.packb([1, 2])), "refused"),
    ("a payload that is nothing", "is unpacked", msgpack.ExtType(1, b""), "refused"),
    ("an unknown extension", "is run by a hook", msgpack.ExtType(99, pickle.dumps(print)), "refused"),
    ("a timestamp", "is an extension of MessagePack itself", msgpack.Timestamp(1), "refused"),
    ("extensions in extensions", "uses up the stack", msgpack.ExtType(1, msgpack.packb(_GOOD)), "refused"),
    ("a complex number of three parts", "unpacks too much", msgpack.ExtType(2, msgpack.packb([1.0, 2.0, 3.0])), "refused"),
    ("a complex number beyond a double", "overflows", msgpack.ExtType(2, msgpack.packb([2**64 - 1, 1.0])), "harmless"),
    ("chunks that are none", "are joined", _chunked({"0": 4}, {"0": 1}), "refused"),
    ("chunks of several dtypes", "are joined", _chunked({"0": 6}, {"0": _GOOD, "1": _array([2], "int32", bytes(8))}), "refused"),
    ("no chunks of a shape", "are joined with uninitialized memory", _chunked({"0": 4}, {}), "refused"),
    ("chunks of less than the shape", "the same", _chunked({"0": 400}, {"0": _GOOD}), "refused"),
    ("a bomb in gzip", "grows when it is unpacked", gzip.compress(bytes(1 << 20)), "harmless"),
    ("a pickle", "is loaded", pickle.dumps({"a": 1}), "harmless"),
    ("a named tuple of ten fields and one value", "loses leaves", {"name": "N", "fields": {str(n): "f" for n in range(10)}, "values": {"0": 1}}, "harmless"),
    ("an array elsewhere", "opens another file", f"//GDAPlaceholder:../{OUTSIDE}/array", "refused"),
    ("an array at an absolute path", "opens another file", "//GDAPlaceholder:/etc", "refused"),
    ("an array called NUL", "ends a name early", "//GDAPlaceholder:a\0b", "refused"),
    ("an array called nothing", "opens the folder", "//GDAPlaceholder:", "refused"),
]  # fmt: skip

_D = b"\xdd" + struct.pack(">I", 2**32 - 1)
_RAW: list[tuple[str, str, bytes, int, Verdict]] = [
    ("a map of four billion", "makes room for it", b"\xdf\xff\xff\xff\xff", 0, "refused"),
    ("four billion numbers in holes", "fills the memory", _D, 2**32 + 5, "refused"),
    ("a text of 3 GB in holes", "fills the memory", b"\x81\xa1a\xdb" + struct.pack(">I", 3 << 30), (3 << 30) + 8, "refused"),
    ("a text of 250 MB in holes", "fills the memory", b"\x81\xa1a\xdb" + struct.pack(">I", 250 << 20), (250 << 20) + 7, "refused"),
    ("bytes of 60 MB in holes", "fills the memory, below a limit", b"\x81\xa1a\xc6" + struct.pack(">I", 60 << 20), (60 << 20) + 7, "harmless"),
    ("four million numbers in holes", "fills the memory, below a limit", b"\x81\xa1a\xdd" + struct.pack(">I", 4_000_000), 4_000_007, "refused"),
    ("100,000 maps in one another", "uses up the stack", b"\x81\xa1a" * 100_000 + b"\1", 0, "refused"),
    ("100,000 lists in one another", "uses up the stack", b"\x81\xa1a" + b"\x91" * 100_000 + b"\1", 0, "refused"),
    ("900 maps in one another", "uses up the stack of later operations", b"\x81\xa1a" * 900 + b"\1", 0, "harmless"),
    ("paths of a gigabyte", "multiplies a long name", b"\x81\xda\xff\xff" + b"k" * 65535 + b"\xdd" + struct.pack(">I", 20_000) + bytes(20_000), 0, "refused"),
    ("one key twice", "loses a leaf", b"\x82\xa1a\1\xa1a\2", 0, "refused"),
    ("keys 1 and 1.0", "are one key to Python", b"\x82\x01\1\xcb\x3f\xf0" + bytes(6) + b"\2", 0, "refused"),
    ("a key that is NaN", "is never found again", b"\x81\xcb\x7f\xf8" + bytes(6) + b"\1", 0, "harmless"),
    ("a key that is a map", "cannot be a key", b"\x81\x80\1", 0, "refused"),
    ("a key that is 0xc1", "is never used", b"\x81\xc1\1", 0, "refused"),
    ("a text that is no UTF-8", "cannot be decoded", b"\x81\xa1a\xa2\xff\xfe", 0, "refused"),
    ("a text with a surrogate", "cannot be written again", b"\x81\xa1a\xa3\xed\xa0\x80", 0, "refused"),
    ("more behind the end", "is ignored", b"\x81\xa1a\1\1", 0, "refused"),
]  # fmt: skip


def _flax(data: bytes, size: int, folder: Path) -> Path:
    path = folder / "x.msgpack"
    path.write_bytes(data)
    write_zarr(folder.parent / OUTSIDE / "array", np.frombuffer(CANARY, np.uint8))
    if size:
        with path.open("r+b") as file:
            file.truncate(size)
    return path


def _fjformer(data: bytes, size: int, folder: Path) -> Path:
    """Writes the value as the bytes of a leaf, in a stream with holes if `size` asks for them."""
    path = folder / "streaming_params"
    path.write_bytes(b"\x92\x91\xa1k\xc6" + struct.pack(">I", min(size or len(data), 2**32 - 1)) + data)
    if size:
        with path.open("r+b") as file:
            file.truncate(size + 9)
    return path


def _t5x(data: bytes, size: int, folder: Path) -> Path:
    path = folder / "checkpoint_3"
    path.mkdir()
    write_zarr(folder.parent / OUTSIDE / "array", np.frombuffer(CANARY, np.uint8))
    head = b"\x82\xa7version\3\xa9optimizer"
    (path / "checkpoint").write_bytes(head + data)
    if size:
        with (path / "checkpoint").open("r+b") as file:
            file.truncate(size + len(head))
    return path


def _spec(**change: Any) -> dict[str, Any]:
    kvstore = {"driver": "file", "path": "weight/"}
    metadata = {"shape": [3, 4], "dtype": "<f4"}
    return {"driver": "zarr", "dtype": "float32", "kvstore": kvstore, "metadata": metadata, **change}


def _at(path: Any, driver: Any = "file") -> dict[str, Any]:
    return _spec(kvstore={"driver": driver, "path": path})


_SPECS: list[tuple[str, str, Any]] = [
    ("an array above the folder", "opens another file", _at(f"../../{OUTSIDE}/array")),
    ("an array at an absolute path", "opens another file", _at("/etc")),
    ("an array in the folder, by a detour", "opens another file", _at("weight/../weight")),
    ("an array called NUL", "ends a name early", _at("a\0b")),
    ("an array called nothing", "opens the folder", _at("")),
    ("an array without a name", "opens the folder", _at(None)),
    ("an array on the net", "asks a server", _at("http://127.0.0.1:1/x", "http")),
    ("an array in memory", "opens nothing", _at("x", "memory")),
    ("another driver", "opens anything", _spec(driver="n5")),
    ("a name of 5000 levels", "uses up the stack", _at("/".join("a" * 5000))),
    ("a name of 5000 letters", "is longer than names are", _at("a" * 5000)),
    ("a kvstore that is a list", "is unpacked", _spec(kvstore=[1])),
    ("another shape", "reads past the array", _spec(metadata={"shape": [30, 40]})),
    ("another dtype", "reads bytes as what they are not", _spec(dtype="int32")),
    ("a transform", "shows another part", _spec(transform={"input_rank": 2, "output": [{"index_array": [[0]]}] * 2})),
]  # fmt: skip


def _specified(spec: Any, folder: Path) -> Path:
    path = _t5x(msgpack.packb({"target": {"weight": spec}}, use_bin_type=True), 0, folder)
    write_zarr(path / "weight", np.ones((3, 4), np.float32))
    return path


def _versioned(version: Any, folder: Path) -> Path:
    path = SUBJECTS["t5x"](folder)
    (path / "checkpoint").unlink()
    (path / "checkpoint").write_bytes(msgpack.packb({"version": version, "optimizer": {"target": {}}}))
    return path


_MAKERS: dict[str, Callable[[bytes, int, Path], Path]] = {"flax": _flax, "fjformer": _fjformer, "t5x": _t5x}
for format, make in _MAKERS.items():
    for name, tries, leaf, verdict in _LEAVES:
        value = leaf if format == "fjformer" else {"a": leaf}
        if isinstance(leaf, str) and format != "flax":
            verdict = "harmless"  # text like any other
        add(format, f"leaf: {name}", tries, partial(make, msgpack.packb(value, use_bin_type=True), 0), verdict)
    for name, tries, data, size, verdict in _RAW:
        add(format, f"structure: {name}", tries, partial(make, data, size), verdict)
for name, tries, spec in _SPECS:
    add("t5x", f"spec: {name}", tries, partial(_specified, spec))
for version in (1, 4, -1, 2**63, "3", None, [], 3.5):
    add("t5x", f"version {version!r}", "is read as if it were known", partial(_versioned, version))


def _index(target: Any, folder: Path) -> Path:
    path = SUBJECTS["flax, shards"](folder)
    (folder.parent / OUTSIDE / "x.msgpack").write_bytes(msgpack.packb({"secret": CANARY}))
    index = path / "flax_model.msgpack.index.json"
    known = json.loads(index.read_bytes())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**known, "secret": target}}))
    return path


for target in (f"../../{OUTSIDE}/x.msgpack", "/etc/passwd", "..", "", "a\0b", "\ud800", "x" * 5000, 0, None):
    add("flax, shards", f"leaf in {target!r:.30}", "opens another file", partial(_index, target))


def _stream(key: Any, folder: Path) -> Path:
    path = folder / "streaming_params"
    path.write_bytes(msgpack.packb([key, msgpack.packb(1)], use_bin_type=True))
    return path


for name, key, verdict in (
    ("no key", [], "refused"),
    ("a key that is text", "ab", "refused"),
    ("a key of numbers", [1, 2], "refused"),
    ("a key of 5000 levels", ["a"] * 5000, "refused"),
    ("a key that leads out", ["..", "..", OUTSIDE, "canary"], "harmless"),
):
    add("fjformer", f"stream: {name}", "is used as a path", partial(_stream, key), verdict)


def _pickled(name: str, folder: Path) -> Path:
    path = folder / name
    path.write_bytes(pickle.dumps({"a": np.ones(3)}))
    return path


for name in ("metadata.pkl", "dataset.pkl", "streaming_params"):
    add("fjformer", f"pickle called {name}", "runs code when it is opened", partial(_pickled, name))
