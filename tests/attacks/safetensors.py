"""Attacks on safetensors: false headers, and indexes that point elsewhere."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from . import OUTSIDE, Verdict, add
from .subjects import SUBJECTS

_BODY = bytes(range(1, 17))


def _entry(begin: int, end: int, shape: Any = None, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def _file(text: bytes, folder: Path, *, claim: int | None = None, body: bytes = _BODY) -> Path:
    path = folder / "x.safetensors"
    path.write_bytes((len(text) if claim is None else claim).to_bytes(8, "little") + text + body)
    return path


def _sparse(claim: int, folder: Path) -> Path:
    path = _file(b"{", folder, claim=claim)
    with path.open("r+b") as file:
        file.truncate(100 << 30)
    return path


_ALL = _entry(0, 16)
_HEADERS: list[tuple[str, str, Any, Verdict]] = [
    ("tensors that overlap", "shares memory between arrays", {"a": _entry(0, 10), "b": _entry(6, 16)}, "refused"),
    ("tensors on one another", "shares memory between arrays", {"a": _ALL, "b": _ALL}, "refused"),
    ("a hole", "hides bytes", {"a": _entry(0, 7), "b": _entry(8, 16)}, "refused"),
    ("a hole at the end", "hides bytes", {"a": _entry(0, 15)}, "refused"),
    ("a hole at the beginning", "hides bytes", {"a": _entry(1, 16)}, "refused"),
    ("an end beyond the file", "reads past it", {"a": _entry(0, 17)}, "refused"),
    ("an end beyond 64 bits", "overflows", {"a": _entry(0, 2**64 + 16)}, "refused"),
    ("a beginning below zero", "reads the header", {"a": _entry(-1, 16)}, "refused"),
    ("an end before the beginning", "goes backwards", {"a": _entry(16, 0)}, "refused"),
    ("a shape larger than the bytes", "reads past them", {"a": _entry(0, 16, [17])}, "refused"),
    ("a shape whose product overflows to 16", "fits in 64 bits", {"a": _entry(0, 16, [2**32, 2**32, 16])}, "refused"),
    ("an axis beyond 64 bits", "overflows", {"a": _entry(0, 16, [2**64 + 16])}, "refused"),
    ("an axis below zero", "is any size", {"a": _entry(0, 16, [-4, -4])}, "refused"),
    ("65 axes", "NumPy has no such arrays", {"a": _entry(0, 16, [1] * 64 + [16])}, "refused"),
    ("an empty array of 2^80 rows", "overflows", {"a": _ALL, "b": _entry(16, 16, [0, 2**80])}, "refused"),
    ("an empty array of 2^62 rows", "overflows", {"a": _ALL, "b": _entry(16, 16, [2**62, 2**62, 0])}, "refused"),
    ("an unknown dtype", "makes a class of a name", {"a": _entry(0, 16, dtype="O")}, "refused"),
    ("a dtype that is no text", "makes a class of it", {"a": _entry(0, 16, dtype={"a": 1})}, "refused"),
    ("a leaf below a leaf", "is a leaf and a container", {"a": _entry(0, 8), "a/b": _entry(8, 16)}, "harmless"),
    ("a name of 5000 levels", "uses up the stack", {"/".join("a" * 5000): _ALL}, "harmless"),
    ("a name that leads out", "is used as the name of a file", {f"../{OUTSIDE}/canary": _ALL}, "harmless"),
    ("metadata that is no text", "is used as text", {"__metadata__": {"a": 1}, "a": _ALL}, "refused"),
    ("metadata of ours that lies", "is believed", {"__metadata__": {"treering": '{"step":1e999}'}, "a": _ALL}, "harmless"),
    ("a step beyond 64 bits", "overflows", {"__metadata__": {"treering": '{"step":%d}' % 2**80}, "a": _ALL}, "harmless"),
    ("metrics beyond a double", "overflows", {"__metadata__": {"treering": '{"metrics":{"a":%d}}' % 10**400}, "a": _ALL}, "harmless"),
    ("3000 tensors without bytes", "are all at one place", {"a": _ALL, **{f"b{n}": _entry(16, 16) for n in range(3000)}}, "harmless"),
]  # fmt: skip
_TEXTS: list[tuple[str, str, bytes, Verdict]] = [
    ("one tensor twice", "means one thing to one reader and another to the next", b'{"a":%s,"a":%s}', "refused"),
    ("one tensor twice, spelt differently", "hides that", b'{"a":%s,"\\u0061":%s}', "refused"),
    ("offsets twice", "means two things", b'{"a":{"dtype":"U8","shape":[16],"data_offsets":[0,1],"data_offsets":[0,16]}}', "refused"),
    ("NaN as a size", "is no JSON", b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,16]}}', "refused"),
    ("1e999 as a size", "becomes infinity", b'{"a":{"dtype":"U8","shape":[1e999],"data_offsets":[0,16]}}', "refused"),
    ("a fraction as a size", "is rounded", b'{"a":{"dtype":"U8","shape":[16.5],"data_offsets":[0,16]}}', "refused"),
    ("a number of a million digits", "takes quadratic time", b'{"a":{"dtype":"U8","shape":[' + b"9" * 10**6 + b'],"data_offsets":[0,16]}}', "refused"),
    ("a lone surrogate as a name", "cannot be written again", b'{"\\ud800":%s}', "harmless"),
    ("NUL in a name", "ends it early", b'{"a\\u0000b":%s}', "harmless"),
    ("no UTF-8", "cannot be decoded", b'{"\xff\xfe":%s}', "refused"),
    ("an array instead of an object", "is no header", b"[%s]", "refused"),
    ("something behind the header", "is ignored", b'{"a":%s} {}', "refused"),
]  # fmt: skip


def _text(text: bytes, folder: Path) -> Path:
    return _file(text.replace(b"%s", json.dumps(_ALL).encode()), folder)


def _index(weights: Any, folder: Path) -> Path:
    path = SUBJECTS["safetensors, shards"](folder)
    _file(json.dumps({"secret": _ALL}).encode(), folder.parent / OUTSIDE)
    known = json.loads((path / "model.safetensors.index.json").read_bytes())["weight_map"]
    text = json.dumps({"weight_map": {**known, **weights} if isinstance(weights, dict) else weights})
    (path / "model.safetensors.index.json").unlink()
    (path / "model.safetensors.index.json").write_text(text)
    return path


for name, tries, header, verdict in _HEADERS:
    add("safetensors", f"header: {name}", tries, partial(_file, json.dumps(header).encode()), verdict)
for name, tries, text, verdict in _TEXTS:
    add("safetensors", f"header: {name}", tries, partial(_text, text), verdict)
for size in (10**8 + 1, 90 << 30, 2**63, 2**64 - 1):
    add("safetensors", f"header of {size} bytes", "is read at once", partial(_sparse, size))
add("safetensors", "header of 99 MB of holes", "is read at once", partial(_sparse, 99_000_000))
for target in (
    f"../../{OUTSIDE}/x.safetensors",
    "/etc/passwd",
    "..",
    "",
    "a\0b",
    "\ud800",
    "x" * 5000,
    "model.safetensors.index.json",
):
    add("safetensors, shards", f"tensor in {target!r:.30}", "opens another file", partial(_index, {"secret": target}))
add("safetensors, shards", "a list for a map", "is used as a map", partial(_index, ["a"]))
add("safetensors, shards", "a number for a file", "is opened as a descriptor", partial(_index, {"weight": 0}))
