"""Attacks on Treering's own format: false manifests with right checksums, and array files that match them."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from treering.formats.treering import manifest

from . import Verdict, add
from .subjects import SUBJECTS

Change = Callable[[Any], None]


def _sealed(path: Path, text: bytes) -> None:
    """Writes a manifest with the checksum that fits it."""
    (path / "treering.json").unlink()
    (path / "treering.json").write_bytes(text + b',"xxh3":"' + manifest.xxh3(text).encode() + b'"}\n')


def _changed(change: Change, folder: Path) -> Path:
    path = SUBJECTS["treering"](folder)
    found = json.loads((path / "treering.json").read_bytes())
    del found["xxh3"]
    change(found)
    _sealed(path, json.dumps(found).encode()[:-1])
    return path


def _replaced(old: bytes, new: bytes, folder: Path) -> Path:
    path = SUBJECTS["treering"](folder)
    text = (path / "treering.json").read_bytes()[:-28]
    assert old in text
    _sealed(path, text.replace(old, new, 1))
    return path


def _headed(change: Callable[[bytes], bytes], folder: Path) -> Path:
    """Makes an array file with another header of the same size, whose checksum the manifest has."""
    path = SUBJECTS["treering"](folder)
    (file,) = path.glob("*.safetensors")
    data = file.read_bytes()
    header = change(data[8:4096].rstrip()).ljust(4088)
    data = data[:8] + header[:4088] + data[4096:]
    file.unlink()
    file.write_bytes(data)
    found = json.loads((path / "treering.json").read_bytes())
    del found["xxh3"]
    found["files"][0]["xxh3"] = manifest.xxh3(data[:4096])
    _sealed(path, json.dumps(found).encode()[:-1])
    return path


def _leaf(found: Any, number: int, place: int, value: Any) -> None:
    found["leaves"][number][place] = value


def _deep(found: Any, levels: int) -> None:
    """Makes a tree of that many levels with one leaf."""
    found["tree"] = [["list", "", 1]] * levels + [0]
    found["leaves"] = [["value", "/".join("0" * levels), "int", 1]]
    found["files"] = []


def _many(found: Any) -> None:
    found["tree"] = [["list", "", 1]] * 3000 + [["list", "", 3000], *[0] * 3000]
    below = "/".join("0" * 3000)
    found["leaves"] = [["value", f"{below}/{n}", "int", 1] for n in range(3000)]


def _layout(boxes: Any, files: Any) -> Change:
    def change(found: Any) -> None:
        found["layouts"] = [{"boxes": boxes, "files": files}]
        found["leaves"][1][-1] = [0, 0]

    return change


_NAMES = (
    "../outside/canary",
    "/etc/passwd",
    "..",
    "",
    "a/b",
    "a\\b",
    "a\0b",
    "\ud800",
    "x" * 5000,
    "\n",
    "treering.json",
)
_SHAPES = ([10**9], [2**63], [2**64], [-3, -4], [3, 4, 0], [2**40, 2**40], [1] * 65, [12.0], ["3", 4], 12)
_WHERE = (1, -1, 2**63, [0, 0], [0, -1], [-1, 0], "weight", "deep/bias", "", None, [0], {"a": 1})

_CHANGES: list[tuple[str, str, Change, Verdict]] = [
    *(
        (f"file called {name!r:.20}", "opens another file", lambda m, n=name: m["files"][0].update(name=n), "refused")
        for name in _NAMES
    ),
    *(
        (f"shape {shape!r:.20}", "allocates memory or views out of bounds", partial(_leaf, number=1, place=4, value=shape), "refused")
        for shape in _SHAPES
    ),
    *(
        (f"array at {where!r}", "points to nothing, or to itself", partial(_leaf, number=1, place=6, value=where), "refused")
        for where in _WHERE
    ),
    ("another dtype of the size", "reads bytes as what they are not", partial(_leaf, number=1, place=3, value="int32"), "harmless"),
    ("a larger dtype", "reads past the array", partial(_leaf, number=1, place=3, value="float64"), "refused"),
    ("an unknown dtype", "makes a class of a name", partial(_leaf, number=1, place=3, value="O"), "refused"),
    ("text of a gigabyte", "makes a dtype of a gigabyte", partial(_leaf, number=1, place=3, value="<U250000000"), "refused"),
    ("text of 10^30 characters", "makes a dtype without end", partial(_leaf, number=1, place=3, value=f"<U{10**30}"), "refused"),
    ("a billion leaves", "makes containers as large as they say", lambda m: m["tree"].__setitem__(0, ["list", "", 10**9]), "refused"),
    ("less than no leaves", "counts backwards", lambda m: m["tree"].__setitem__(0, ["list", "", -1]), "refused"),
    ("leaves without a tree", "adds them up wrongly", lambda m: m.update(tree=[]), "refused"),
    ("100,000 empty containers", "adds up to a leaf too few", lambda m: m.update(tree=[["list", "", 0]] * 10**5), "refused"),
    ("one key twice in a container", "loses a leaf", lambda m: m["tree"][0].__setitem__(2, ["deep", "deep"]), "refused"),
    ("one path twice", "loses a leaf", partial(_leaf, number=1, place=1, value="deep/bias"), "refused"),
    ("10,000 levels", "uses up the stack", partial(_deep, levels=10_000), "harmless"),
    ("900 levels", "uses up the stack of later operations", partial(_deep, levels=900), "harmless"),
    ("3000 paths of 3000 levels", "takes quadratic time", _many, "harmless"),
    ("files without end", "opens a file a hundred thousand times", lambda m: m.update(files=m["files"] * 100_000), "refused"),
    ("a header of a terabyte", "reads it", lambda m: m["files"][0].update(header=10**12), "refused"),
    ("a size of a terabyte", "maps it", lambda m: m["files"][0].update(size=10**12), "refused"),
    ("a size beyond 64 bits", "overflows", lambda m: m["files"][0].update(size=2**64 + 5000), "refused"),
    ("a step beyond 64 bits", "overflows", lambda m: m.update(step=2**80), "harmless"),
    ("a step below zero", "comes before the first", lambda m: m.update(step=-1), "harmless"),
    ("a year beyond ten thousand", "overflows", lambda m: m.update(created="99999-01-01T00:00:00Z"), "harmless"),
    ("metadata of 900 levels", "uses up the stack of later operations", lambda m: m.update(metadata=_nest(900)), "harmless"),
    ("an int that is none", "reads any text as a number", lambda m: m["leaves"].append(["value", "x", "int", "0xg"]), "refused"),
    ("an int of a million digits", "takes quadratic time", lambda m: _value(m, "int", "0x" + "f" * 10**6), "harmless"),
    ("a float of another kind", "reads missing bits", lambda m: _value(m, "float", "nan:7ff8"), "refused"),
    ("a complex number of three parts", "unpacks too much", lambda m: _value(m, "complex", [1, 2, 3]), "refused"),
    ("bytes that are not base64", "skips what does not fit", lambda m: _value(m, "bytes", "a*b="), "refused"),
    ("a value of an unknown type", "makes a class of a name", lambda m: _value(m, "object", "os.system"), "refused"),
    ("a typed key of no implementation", "makes a class of a name", lambda m: _key(m, "os"), "unread"),
    ("boxes that overlap", "returns uninitialized memory", _layout([[[0, 2], [0, 4]]] * 2, [[0], [0]]), "refused"),
    ("boxes beyond the array", "writes past it", _layout([[[0, 300], [0, 4]]], [[0]]), "refused"),
    ("boxes that end before they begin", "goes backwards", _layout([[[3, 0], [0, 4]]], [[0]]), "refused"),
    ("boxes below zero", "writes before it", _layout([[[-3, 3], [0, 4]]], [[0]]), "refused"),
    ("boxes of 2^62", "overflows", _layout([[[0, 2**62], [0, 2**62]]], [[0]]), "refused"),
    ("50,000 boxes", "takes quadratic time", _layout([[[n, n + 1], [0, 4]] for n in range(50_000)], [[0]] * 50_000), "refused"),
    ("boxes without files", "uses the first of no files", _layout([[[0, 3], [0, 4]]], [[]]), "refused"),
    ("a later version", "is read as if it were this one", lambda m: m.update(version=2), "refused"),
    ("an unknown feature", "is ignored", lambda m: m.update(requires=["compression"]), "refused"),
]  # fmt: skip


def _nest(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


def _value(found: Any, kind: str, value: Any) -> None:
    found["tree"], found["leaves"], found["files"] = [0], [["value", "", kind, value]], []


def _key(found: Any, impl: str) -> None:
    found["leaves"][1][2], found["leaves"][1][5] = "key", impl


_TEXTS: list[tuple[str, str, bytes, bytes, Verdict]] = [
    ("one field twice", "means one thing to one reader and another to the next", b'"version":1', b'"version":1,"version":1', "refused"),
    ("NaN", "is no JSON", b'"version":1', b'"version":1,"x":NaN', "refused"),
    ("1e999", "becomes infinity", b'"version":1', b'"version":1,"x":1e999', "refused"),
    ("-1e999", "becomes infinity", b'"version":1', b'"version":1,"step":-1e999', "refused"),
    ("a number of a million digits", "takes quadratic time", b'"version":1', b'"version":1,"x":' + b"9" * 10**6, "refused"),
    ("4000 digits", "is within what Python parses", b'"version":1', b'"version":1,"metadata":' + b"9" * 4000, "harmless"),
    ("a lone surrogate as metadata", "cannot be written again", b'"version":1', b'"version":1,"metadata":"\\ud800"', "harmless"),
    ("a lone surrogate in a path", "cannot be written again", b'"weight"', b'"\\ud800"', "harmless"),
    ("no UTF-8", "cannot be decoded", b'"weight"', b'"\xff"', "refused"),
    ("nested objects", "uses up the stack", b'"version":1', b'"version":1,"x":' + b'{"a":' * 10**5 + b"1" + b"}" * 10**5, "refused"),
]  # fmt: skip

_HEADERS: list[tuple[str, str, Callable[[bytes], bytes], Verdict]] = [
    ("tensors on one another", "shares memory between arrays", lambda h: h.replace(b"[0,48]", b"[0,20]").replace(b"[48,68]", b"[0,20]"), "refused"),
    ("a hole between tensors", "hides bytes", lambda h: h.replace(b"[48,68]", b"[49,69]"), "refused"),
    ("offsets beyond 64 bits", "overflows", lambda h: h.replace(b"[0,48]", b"[0,%d]" % 2**64), "refused"),
    ("offsets below zero", "reads the bytes before", lambda h: h.replace(b"[0,48]", b"[-48,0]"), "refused"),
    ("a tensor too few", "finds nothing", lambda h: h.replace(b'"weight"', b'"weighs"'), "refused"),
    ("one tensor twice", "means one thing to one reader and another to the next", lambda h: h.replace(b'"deep/bias"', b'"weight"'), "refused"),
    ("no checksums", "is read unchecked", lambda h: h.replace(b'"xxh3"', b'"xxhx"'), "refused"),
    ("blocks of another size", "checks something else", lambda h: h.replace(b"1048576", b"1048577"), "refused"),
    ("no JSON", "is read anyway", lambda h: b"{" + h, "refused"),
]  # fmt: skip

for name, tries, change, verdict in _CHANGES:
    add("treering", f"manifest: {name}", tries, partial(_changed, change), verdict)
for name, tries, old, new, verdict in _TEXTS:
    add("treering", f"manifest: {name}", tries, partial(_replaced, old, new), verdict)
for name, tries, alter, verdict in _HEADERS:
    add("treering", f"header: {name}", tries, partial(_headed, alter), verdict)
