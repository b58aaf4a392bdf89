"""Attacks on zarr arrays of Orbax, T5X and Levanter: false metadata, growing chunks, databases that point elsewhere."""

import functools
import gzip
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from treering.formats.tensorflow.table import crc32c

from . import CANARY, OUTSIDE, Verdict, add
from .subjects import SUBJECTS, write_zarr

_NODE = bytes.fromhex("0cdb20de")  # the beginning of a database's node
Data = bytes | Callable[[], bytes]  # data that takes long to make is made on demand

_GZIP = {"id": "gzip", "level": 1}


@functools.cache
def _gzip_bomb() -> bytes:
    return gzip.compress(bytes(256 << 20), 6)


@functools.cache
def _zlib_bomb() -> bytes:
    return zlib.compress(bytes(256 << 20), 6)


def _made(data: Data) -> bytes:
    return data if isinstance(data, bytes) else data()


_ZSTD_BOMB = b"\x28\xb5\x2f\xfd\0\x80" + (((131072 << 3) | 2).to_bytes(3, "little") + b"\0") * 8000  # of a gigabyte
_BLOSC_BOMB = b"\2\1\x21\1" + (48).to_bytes(4, "little") + (48).to_bytes(4, "little") + (2**31).to_bytes(4, "little")
_METADATA: list[tuple[str, str, dict[str, Any], Verdict]] = [
    ("chunks of no rows", "divides by zero", {"chunks": [0, 4]}, "refused"),
    ("chunks below zero", "goes backwards", {"chunks": [-3, 4]}, "refused"),
    ("chunks of 2^62 rows", "is made room for", {"chunks": [2**62, 4]}, "refused"),
    ("chunks of 4 GB", "is made room for", {"chunks": [2**28, 4]}, "refused"),
    ("chunks of fewer axes", "counts past the end", {"chunks": [12]}, "refused"),
    ("a shape of 2^40 rows", "is made room for", {"shape": [2**40, 4]}, "refused"),
    ("a shape of 2^80 rows", "overflows", {"shape": [2**80, 4]}, "refused"),
    ("a shape below zero", "is any size", {"shape": [-3, -4]}, "refused"),
    ("a shape of 2^30 chunks", "asks for each of them", {"shape": [2**30, 4], "chunks": [1, 4]}, "refused"),
    ("a shape of fractions", "is rounded", {"shape": [3.5, 4]}, "refused"),
    ("NaN as a size", "is no JSON", {"shape": [float("nan"), 4]}, "refused"),
    ("33 axes", "is more than there can be", {"shape": [1] * 33, "chunks": [1] * 33}, "refused"),
    ("an unknown codec", "is looked up", {"compressor": {"id": "../../x"}}, "refused"),
    ("a codec without a name", "is looked up", {"compressor": {}}, "refused"),
    ("a filter", "is run", {"filters": [{"id": "pickle"}]}, "refused"),
    ("a dtype of objects", "makes pointers of bytes", {"dtype": "|O"}, "refused"),
    ("a structured dtype", "makes pointers of bytes", {"dtype": [["a", "|O"]]}, "refused"),
    ("a separator that leads out", "is used in names of files", {"dimension_separator": "/../../"}, "refused"),
    ("version 9", "is read as if it were known", {"zarr_format": 9}, "refused"),
    ("a fill value of gigabytes", "is allocated", {"fill_value": "a" * (1 << 20)}, "right"),
]  # fmt: skip
_CHUNKS: list[tuple[str, str, dict[str, Any], Data, Verdict]] = [
    ("256 MB in gzip", "grows when it is unpacked", {"compressor": _GZIP}, _gzip_bomb, "refused"),
    ("256 MB in zlib", "grows when it is unpacked", {"compressor": {"id": "zlib", "level": 1}}, _zlib_bomb, "refused"),
    ("a gigabyte in zstd", "grows when it is unpacked", {"compressor": {"id": "zstd"}}, _ZSTD_BOMB, "refused"),
    ("2 GB in blosc", "claims to grow", {"compressor": {"id": "blosc"}}, _BLOSC_BOMB, "refused"),
    ("a frame of zstd of 2^40 bytes", "is made room for", {"compressor": {"id": "zstd"}}, b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little"), "refused"),
    ("nothing", "is filled up", {"compressor": _GZIP}, b"", "refused"),
    ("no gzip", "is taken as it is", {"compressor": _GZIP}, bytes(48), "refused"),
    ("a byte too few", "is filled up", {}, bytes(47), "refused"),
    ("a byte too many", "is cut off", {}, bytes(49), "refused"),
]  # fmt: skip


def _spoil(path: Path, metadata: dict[str, Any], chunk: Data | None, change: Callable[[Path], None] | None) -> None:
    """Replaces the array `weight` in a folder by a damaged one."""
    shutil.rmtree(path / "weight")
    write_zarr(path / "weight", np.arange(1, 13, dtype=np.float32).reshape(3, 4), **metadata)
    if chunk is not None:
        (path / "weight" / "0.0").write_bytes(_made(chunk))
    if change:
        change(path / "weight")


def _array(subject: str, metadata: dict[str, Any], chunk: Data | None, folder: Path, change: Any = None) -> Path:
    path = SUBJECTS[subject](folder)
    if subject == "t5x":
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": "weight"}, "metadata": {}}
        (path / "checkpoint").unlink()
        (path / "checkpoint").write_bytes(msgpack.packb({"version": 3, "optimizer": {"target": {"weight": spec}}}))
        (path / "weight").mkdir()
    _spoil(path, metadata, chunk, change)
    return path


def _pipe(array: Path) -> None:
    (array / "0.0").unlink()
    os.mkfifo(array / "0.0")


def _link_to_folder(array: Path) -> None:
    """Replaces an array by a link to one outside."""
    place = next(parent for parent in array.parents if (parent / OUTSIDE).exists()) / OUTSIDE / "array"
    write_zarr(place, np.frombuffer(CANARY, np.uint8))
    shutil.rmtree(array)
    array.symlink_to(place)


for subject in ("orbax, files", "t5x", "levanter"):
    for name, tries, metadata, verdict in _METADATA:
        if subject == "t5x" and verdict == "right":
            verdict = "harmless"
        add(subject, f"array: {name}", tries, partial(_array, subject, metadata, None), verdict)
    for name, tries, metadata, chunk, verdict in _CHUNKS:
        add(subject, f"chunk: {name}", tries, partial(_array, subject, metadata, chunk), verdict)
    add(
        subject,
        "chunk: a pipe, where it may have any size",
        "waits for ever",
        partial(_array, subject, {"compressor": _GZIP}, None, change=_pipe),
    )
    add(
        subject,
        "array: a link to a folder outside",
        "shows data from outside",
        partial(_array, subject, {}, None, change=_link_to_folder),
    )


def _orbax(key: Any, kind: Any, folder: Path, **more: Any) -> Path:
    """Makes a tree that lists a leaf of this key and kind."""
    path = SUBJECTS["orbax, files"](folder)
    write_zarr(folder.parent / OUTSIDE / "array", np.frombuffer(CANARY, np.uint8))
    about = json.loads((path / "_METADATA").read_bytes())
    keys = [{"key": part, "key_type": 2} for part in key]
    about["tree_metadata"]["x"] = {"key_metadata": keys, "value_metadata": {"value_type": kind}}
    (path / "_METADATA").write_text(json.dumps({**about, **more}))
    return path


def _orbax_text(old: bytes, new: bytes, folder: Path) -> Path:
    path = SUBJECTS["orbax, files"](folder)
    text = (path / "_METADATA").read_bytes()
    assert old in text
    (path / "_METADATA").write_bytes(text.replace(old, new, 1))
    return path


_OUT = f"../../{OUTSIDE}/array"
for name, tries, key, kind, verdict in (
    ("a leaf above the folder", "opens another file", [_OUT], "np.ndarray", "refused"),
    ("a leaf at an absolute path", "opens another file", ["/etc"], "np.ndarray", "refused"),
    ("a leaf called NUL", "ends a name early", ["a\0b"], "np.ndarray", "refused"),
    ("a leaf called '..'", "opens the folder above", ["..", "..", "array"], "np.ndarray", "refused"),
    ("a leaf of 5000 letters", "is longer than names are", ["a" * 5000], "np.ndarray", "refused"),
    ("a leaf of 5000 levels", "uses up the stack", ["a"] * 5000, "np.ndarray", "refused"),
    ("a text of 5000 levels", "uses up the stack", ["a"] * 5000, "None", "refused"),
    ("a leaf of an unknown kind", "makes a class of a name", ["a"], "os.system", "refused"),
    ("a leaf that is a surrogate", "cannot be written again", ["\ud800"], "np.ndarray", "refused"),
    ("a value that is a surrogate", "cannot be written again", ["\ud800"], "None", "harmless"),
    ("a leaf below a leaf", "is a leaf and a container", ["weight", "x"], "np.ndarray", "refused"),
    ("a leaf twice", "loses one", ["weight"], "np.ndarray", "refused"),
    ("two leaves of one name", "loses one", ["deep.bias"], "np.ndarray", "refused"),
):
    add("orbax, files", f"tree: {name}", tries, partial(_orbax, key, kind), verdict)
for name, tries, old, new, verdict in (
    ("NaN as metadata", "is no JSON", b'"use_ocdbt": false', b'"use_ocdbt": false, "custom_metadata": NaN', "right"),
    ("1e999 as metadata", "becomes infinity", b'"use_ocdbt": false', b'"use_ocdbt": false, "custom_metadata": 1e999', "right"),
    ("4000 digits as metadata", "is beyond 64 bits", b'"use_ocdbt": false', b'"use_ocdbt": false, "custom_metadata": ' + b"9" * 4000, "right"),
    ("a million digits", "takes quadratic time", b'"use_ocdbt": false', b'"use_ocdbt": false, "x": ' + b"9" * 10**6, "refused"),
    ("a surrogate as metadata", "cannot be written again", b'"use_ocdbt": false', b'"use_ocdbt": false, "custom_metadata": "\\ud800"', "right"),
    ("nested metadata", "uses up the stack", b'"use_ocdbt": false', b'"use_ocdbt": false, "x": ' + b"[" * 10**5 + b"]" * 10**5, "refused"),
    ("a database that is not there", "is taken for empty", b'"use_ocdbt": false', b'"use_ocdbt": true', "refused"),
    ("a key type of 10^30", "overflows", b'"key_type": 2', b'"key_type": 1' + b"0" * 30, "refused"),
):  # fmt: skip
    add("orbax, files", f"tree: {name}", tries, partial(_orbax_text, old, new), verdict)


def _levanter(text: str, folder: Path) -> Path:
    path = SUBJECTS["levanter"](folder)
    (path / "metadata.json").unlink()
    (path / "metadata.json").write_text(text)
    return path


for step in ("-1", str(2**80), "1e999", "NaN", "9" * 10**5, '"3"', "[3]"):
    text = f'{{"step": {step}, "timestamp": "2026-01-01T00:00:00"}}'
    verdict = "harmless" if step == str(2**80) else "refused"
    add("levanter", f"step {step:.12}", "overflows", partial(_levanter, text), verdict)
add(
    "levanter",
    "a time that is none",
    "is parsed",
    partial(_levanter, '{"step": 3, "timestamp": "\\ud800"}'),
    "harmless",
)


def _database(array: dict[str, Any], chunks: dict[str, Data], folder: Path) -> Path:
    """Makes a database with one array of zarr 3 with this metadata and these chunks."""
    import tensorstore as ts

    path = folder / "step-3"
    keys = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/"}).result()
    about = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [12],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [12]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "fill_value": 0,
    }
    keys.write("weight/zarr.json", json.dumps({**about, **array})).result()
    for key, chunk in chunks.items():
        keys.write(f"weight/{key}", _made(chunk)).result()
    (path / "metadata.json").write_text('{"step": 3, "timestamp": "2026-01-01T00:00:00"}')
    return path


def _grid(*chunks: int) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": chunks}}


_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
_BLOSC = [
    _BYTES,
    {"name": "blosc", "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "noshuffle", "typesize": 4}},
]
for name, tries, array, chunks, verdict in (
    ("2^33 chunks left out", "asks for each of them", {"shape": [2**33], "chunk_grid": _grid(1)}, {}, "refused"),
    ("2^33 chunks in blosc left out", "asks for each of them", {"shape": [2**33], "chunk_grid": _grid(1), "codecs": _BLOSC}, {}, "refused"),
    ("100 million zeros left out", "is made room for, legally", {"shape": [10_000_000], "chunk_grid": _grid(10**6)}, {}, "harmless"),
    ("2^40 zeros left out", "is made room for", {"shape": [2**40], "chunk_grid": _grid(2**30)}, {}, "refused"),
    ("a bomb in gzip", "grows when it is unpacked", {"codecs": [_BYTES, {"name": "gzip", "configuration": {"level": 1}}]}, {"c/0": _gzip_bomb}, "refused"),
    ("a bomb in zstd", "grows when it is unpacked", {"codecs": [_BYTES, {"name": "zstd", "configuration": {"level": 1}}]}, {"c/0": _ZSTD_BOMB}, "refused"),
    ("a chunk too small", "is filled up", {}, {"c/0": bytes(40)}, "refused"),
    ("1000 codecs", "is a long way", {"codecs": [_BYTES] * 1000}, {"c/0": bytes(48)}, "refused"),
    ("shards in shards", "uses up the stack", {"codecs": [{"name": "sharding_indexed", "configuration": {"chunk_shape": [12], "codecs": [_BYTES] * 3, "index_codecs": [_BYTES]}}]}, {"c/0": bytes(64)}, "refused"),
):  # fmt: skip
    add("levanter, database", f"array: {name}", tries, partial(_database, array, chunks), verdict)


def _elsewhere(target: str, folder: Path) -> Path:
    """Makes a database whose node points to a file outside, with a name of the same length and right checksums."""
    import tensorstore as ts

    path = folder / "step-3"
    config = {"compression": None, "max_inline_value_bytes": 0}
    spec = {"driver": "ocdbt", "base": f"file://{path}/", "config": config}
    keys = ts.KvStore.open(spec).result()
    about = {"zarr_format": 3, "node_type": "array", "shape": [32], "data_type": "uint8", "chunk_grid": _grid(32)}
    about |= {"chunk_key_encoding": {"name": "default"}, "codecs": [_BYTES], "fill_value": 1}
    keys.write("weight/zarr.json", json.dumps(about)).result()
    keys.write("weight/c/0", bytes(range(32))).result()
    (path / "metadata.json").write_text('{"step": 3, "timestamp": "2026-01-01T00:00:00"}')
    wanted = target.encode().ljust(34, b"x")  # as long as "d/" and 32 digits
    place = next(parent for parent in path.parents if (parent / OUTSIDE).exists())
    if OUTSIDE in target:
        Path(os.path.normpath(path / wanted.decode())).write_bytes(CANARY * 64)
        assert list((place / OUTSIDE).glob("*xxx"))
    changed = 0
    for file in (path / "d").iterdir():
        data = file.read_bytes()
        begin = data.find(_NODE)
        end = begin + int.from_bytes(data[begin + 4 : begin + 12], "little") - 4
        body, count = re.subn(rb"d/[0-9a-f]{32}", wanted, data[begin:end], count=1)
        changed += count if begin >= 0 else 0
        file.write_bytes(data[:begin] + body + crc32c(body).to_bytes(4, "little") + data[end + 4 :])
    assert changed
    return path


for target in (f"../../{OUTSIDE}/", "d/../../../outside/", "/etc/passwd"):
    add("levanter, database", f"node: data in {target}", "reads another file", partial(_elsewhere, target))
