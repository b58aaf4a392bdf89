"""Drafts of checkpoints. A case changes any part of a draft, and then its files are written."""

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from xxhash import xxh3_64_hexdigest as checksum

CODES = {"bool": "BOOL", "bfloat16": "BF16", "complex64": "C64", "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3"}
CODES |= {"float8_e8m0fnu": "F8_E8M0", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e4m3fnuz": "F8_E4M3FNUZ"}
CODES |= {f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)}
del CODES["float8"]
WIDE = {"complex128": 16, "complex32": 4, "bcomplex32": 4}

Json = Any
Change = Callable[["Draft"], object]
Files = dict[str, bytes]


def itemsize(dtype: str) -> int:
    """Returns the size in bytes of a stored element."""
    if dtype in WIDE:
        return WIDE[dtype]
    if dtype.startswith(("datetime64", "timedelta64")):
        return 8
    if dtype[:2] in ("<U", "|S"):
        return int(dtype[2:]) * (4 if dtype[0] == "<" else 1)
    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


@dataclasses.dataclass
class ArrayFile:
    """An array file: the entries of its header, and the buffer. Metadata that is not given gets the valid values."""

    header: dict[str, Json] = dataclasses.field(default_factory=dict)
    buffer: bytes = b""
    metadata: dict[str, Json] = dataclasses.field(default_factory=dict)
    text: Callable[[bytes], bytes] = lambda text: text  # changes the JSON of the header before the file is sealed
    damage: Callable[[bytes], bytes] = lambda data: data  # changes the file after it is sealed
    listed: dict[str, Json] = dataclasses.field(default_factory=dict)  # changes to its entry in the manifest

    def add(self, name: str, dtype: str, shape: list[int], data: bytes) -> None:
        """Appends a tensor."""
        wide = [itemsize(dtype)] if dtype not in CODES and itemsize(dtype) > 1 else []
        wide = [itemsize(dtype)] if dtype[:2] in ("<U", "|S") else wide
        code = CODES.get(dtype, "U8")
        offsets = [len(self.buffer), len(self.buffer) + len(data)]
        self.header[name] = {"dtype": code, "shape": shape + wide, "data_offsets": offsets}
        self.buffer += data
        if code == "U8" and dtype != "uint8":
            self.metadata[f"dtype:{name}"] = dtype

    def bytes(self) -> tuple[bytes, int]:
        """Returns the bytes of the file, and the number of bytes before the buffer."""
        blocks = [self.buffer[n : n + (1 << 20)] for n in range(0, len(self.buffer), 1 << 20)]
        about = {"xxh3": "".join(map(checksum, blocks)), "block": "1048576", "format": "treering", "version": "1"}
        about |= self.metadata
        kept = {key: value for key, value in about.items() if value is not None}
        text = self.text(json.dumps({"__metadata__": kept, **self.header}, separators=(",", ":")).encode())
        return len(text).to_bytes(8, "little") + text + self.buffer, 8 + len(text)


def sealed(body: bytes) -> bytes:
    """Returns JSON with its checksum as the last field."""
    body = body.rstrip()[:-1]
    return body + b',"xxh3":"' + checksum(body).encode() + b'"}\n'


@dataclasses.dataclass
class Draft:
    """A checkpoint before it is written. `content` has what a reader must find in each leaf."""

    tree: list[Json] = dataclasses.field(default_factory=lambda: [["dict", "", []]])
    leaves: list[Json] = dataclasses.field(default_factory=list)
    files: dict[str, ArrayFile] = dataclasses.field(default_factory=dict)
    fields: dict[str, Json] = dataclasses.field(default_factory=dict)
    content: dict[str, Json] = dataclasses.field(default_factory=dict)
    text: Callable[[bytes], bytes] = lambda text: text  # changes the JSON of the manifest before it is sealed
    damage: Callable[[bytes], bytes] = lambda data: data  # changes the manifest after it is sealed
    missing: frozenset[str] = frozenset()  # array files that are not written

    def child(self, key: Json) -> None:
        """Adds a leaf to the root, which is a dict."""
        self.tree[0][2].append(key)
        self.tree.append(0)

    def value(self, path: str, type: str, value: Json) -> "Draft":
        self.child(path)
        self.leaves.append(["value", path, type, value])
        self.content[path] = {"type": type, "value": value}
        return self

    def array(
        self,
        path: str,
        dtype: str,
        shape: list[int],
        data: bytes,
        *,
        type: str = "numpy",
        impl: str = "",
        file: str = "a.safetensors",
        stored: bytes | None = None,
    ) -> "Draft":
        """Adds an array in one piece. `stored` has its bytes in the file if they differ from `data`."""
        assert len(data) == math.prod(shape) * itemsize(dtype), (path, dtype, shape, len(data))
        self.child(path)
        name = "__metadata__~@" if path == "__metadata__" else path
        self.files.setdefault(file, ArrayFile()).add(name, dtype, shape, data if stored is None else stored)
        self.leaves.append(["array", path, type, dtype, shape, impl, list(self.files).index(file)])
        self.found(path, type, dtype, shape, impl, data)
        return self

    def found(self, path: str, type: str, dtype: str, shape: list[int], impl: str, data: bytes) -> None:
        self.content[path] = {"type": type, "dtype": dtype, "shape": shape, "impl": impl, "xxh3": checksum(data)}

    def manifest(self) -> dict[str, Json]:
        files = []
        for name, file in self.files.items():
            data, header = file.bytes()
            entry = {"name": name, "size": len(data), "header": header, "xxh3": checksum(data[:header])}
            files.append({key: value for key, value in (entry | file.listed).items() if value is not None})
        made = {"format": "treering", "version": 1, "created": "2026-11-22T12:00:00.123456+00:00"}
        made |= {"software": {"by hand": "1"}, "files": files, "tree": self.tree, "leaves": self.leaves}
        return {key: value for key, value in (made | self.fields).items() if value is not ...}

    def written(self) -> Files:
        """Returns all files of the checkpoint. Leaves out array files whose names no file system can have."""
        text = json.dumps(self.manifest(), ensure_ascii=False, separators=(",", ":"))
        out = {"treering.json": self.damage(sealed(self.text(text.encode("utf-8", "surrogatepass"))))}
        for name, file in self.files.items():
            named = (
                not set(name) & set("/\\\0")
                and name not in ("", ".", "..", "treering.json")
                and len(name.encode()) < 256
            )
            if named and name not in self.missing:
                out[name] = file.damage(file.bytes()[0])
        return out


@dataclasses.dataclass
class Case:
    """A checkpoint, and what a reader must find in it. A leaf that is not in `leaves` has the contents of the draft."""

    name: str
    about: str
    draft: Draft
    checkpoint: str = "valid"
    leaves: dict[str, str] = dataclasses.field(default_factory=dict)
    more: Callable[[Files], Files] = lambda files: {}  # makes further files from those of the draft
    metrics: dict[str, Json] = dataclasses.field(default_factory=dict)
    late: dict[str, str] = dataclasses.field(default_factory=dict)  # the verdict on each metrics file that `more` makes

    def verdict(self) -> dict[str, Json]:
        """Returns the entry in `verdicts.json`."""
        if self.checkpoint != "valid":
            return {"about": self.about, "checkpoint": self.checkpoint, "leaves": {}, "metrics": {}, "late": {}}
        leaves = {path: self.leaves.get(path, content) for path, content in self.draft.content.items()}
        rest = {"leaves": leaves, "metrics": self.metrics, "late": self.late}
        return {"about": self.about, "checkpoint": "valid", **rest}


def base() -> Draft:
    """Returns a valid draft with two arrays in one file and a value. Most invalid cases are changes of it."""
    draft = Draft()
    draft.array("a", "int32", [3], np.arange(3, dtype="<i4").tobytes(), type="jax")
    draft.array("b", "float64", [2, 2], np.array([[1.5, -0.0], [np.inf, np.nan]], "<f8").tobytes())
    return draft.value("v", "float", 1.5)


def cut() -> Draft:
    """Returns a draft with an array in four pieces in two files, cut along both axes, and an array in one piece."""
    draft = Draft(
        fields={"layouts": [{"cuts": [[0, 1, 3], [0, 2, 4]], "holders": 0}], "holders": [[[0], [1], [0, 1], [1]]]}
    )
    values = np.arange(12, dtype="<i2").reshape(3, 4)
    draft.child("s")
    draft.leaves.append(["array", "s", "jax", "int16", [3, 4], "", [0, 5]])
    draft.found("s", "jax", "int16", [3, 4], "", values.tobytes())
    for number, (rows, columns) in enumerate([((0, 1), (0, 2)), ((0, 1), (2, 4)), ((1, 3), (0, 2)), ((1, 3), (2, 4))]):
        own = draft.fields["holders"][0][number]
        file = draft.files.setdefault(f"{own[5 % len(own)]}.safetensors", ArrayFile())
        part = values[slice(*rows), slice(*columns)]
        file.add(f"s~@{rows[0]},{columns[0]}", "int16", list(part.shape), part.tobytes())
    return draft.array("w", "uint8", [2], b"\x01\x02", file="0.safetensors")


def changed(make: Callable[[], Draft], change: Change) -> Draft:
    """Returns a draft with a change."""
    draft = copy.deepcopy(make())
    change(draft)
    return draft


def numbered(name: str, count: int) -> Iterator[str]:
    return (f"{name}-{n:02}" for n in range(count))


def refused(name: str, about: str, make: Callable[[], Draft], change: Change) -> Case:
    """Returns the case of a sealed checkpoint that breaks a rule."""
    return Case(name, about, changed(make, change), "unsupported")
