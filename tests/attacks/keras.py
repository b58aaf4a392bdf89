"""Attacks on weights of Keras: HDF5 files whose parts contain each other or lead elsewhere, and their indexes."""

import json
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import OUTSIDE, Verdict, add

_REAL = Path(__file__).parents[1] / "real" / "keras"


def _changed(change: Callable[[bytearray], None], folder: Path) -> Path:
    """Changes a file that Keras wrote."""
    data = bytearray((_REAL / "single.weights.h5").read_bytes())
    change(data)
    path = folder / "x.weights.h5"
    path.write_bytes(data)
    return path


def _put(magic: bytes, at: int, form: str, *values: int, which: int = 0) -> Callable[[bytearray], None]:
    """Returns a change of numbers behind an occurrence of four known bytes."""

    def change(data: bytearray) -> None:
        place = -1
        for _ in range(which + 1):
            place = data.index(magic, place + 1)
        struct.pack_into("<" + form, data, place + at, *values)

    return change


def _group_in_itself(data: bytearray) -> None:
    """Makes the first object in each group the root."""
    place = data.find(b"SNOD")
    while place >= 0:
        struct.pack_into("<Q", data, place + 16, 96)
        place = data.find(b"SNOD", place + 1)


def _shape(*sizes: int) -> Callable[[bytearray], None]:
    """Returns a change of the shape of the first matrix, in its Dataspace message of version 1."""

    def change(data: bytearray) -> None:
        place = data.index(struct.pack("<BBB5xQQ", 1, 2, 1, 3, 2))
        struct.pack_into("<QQ", data, place + 8, *sizes)

    return change


def _shared_heap(data: bytearray) -> None:
    """Appends 3,000 groups that all have one heap of names of 2 MB."""
    count, none = 3000, 2**64 - 1
    names = b"".join(b"%04d\0" % n for n in range(count)).ljust(2 << 20, b"\0")
    heap, root = len(data), len(data) + 32 + len(names)
    children, node = root + 40, root + 40 + 72 * count

    def group(tree: int) -> bytes:
        return struct.pack("<BBHII4xHHB3xQQ", 1, 0, 1, 1, 24, 17, 16, 0, tree, heap)

    data += struct.pack("<4sB3xQQQ", b"HEAP", 0, len(names), 1, heap + 32) + names + group(node)
    for n in range(count):
        data += group(children + 72 * n + 40) + struct.pack("<4sBBHQQQ", b"TREE", 0, 0, 0, none, none, 0)
    data += struct.pack("<4sBBHQQQQQ", b"TREE", 0, 0, 1, none, none, 0, node + 48, 0)
    data += struct.pack("<4sBBH", b"SNOD", 1, 0, count)
    for n in range(count):
        data += struct.pack("<QQI20x", 5 * n, children + 72 * n, 0)
    struct.pack_into("<Q", data, 64, root)
    struct.pack_into("<Q", data, 40, len(data))


def _index(weights: dict[str, object], folder: Path) -> Path:
    path = folder / "x.weights.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weights}))
    return path


def _packed(folder: Path) -> Path:
    path = folder / "x.keras"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", bytes(1 << 28))
    return path


_HUGE = 0xFFFFFFFFFFFFFFF0
_CHANGES: list[tuple[str, str, Callable[[bytearray], None], Verdict]] = [
    ("a group in itself", "has no end", _group_in_itself, "refused"),
    ("3,000 groups with one heap", "is read 3,000 times", _shared_heap, "refused"),
    ("names at 2^64", "reads past the end", _put(b"HEAP", 24, "Q", _HUGE), "refused"),
    ("names of 2^64 bytes", "is made room for", _put(b"HEAP", 8, "Q", _HUGE), "refused"),
    ("a heap of texts of 2^64 bytes", "reads past the end", _put(b"GCOL", 8, "Q", _HUGE), "harmless"),
    ("a text of 2^64 bytes", "is made room for", _put(b"GCOL", 24, "Q", _HUGE), "harmless"),
    ("65,535 children", "reads past the node", _put(b"TREE", 6, "H", 65535), "refused"),
    ("65,535 names in a node", "reads past the node", _put(b"SNOD", 6, "H", 65535), "refused"),
    ("an object at 2^64", "reads past the end", _put(b"SNOD", 16, "Q", _HUGE), "refused"),
    ("a shape of 2^40", "is made room for", _shape(1 << 20, 1 << 20), "refused"),
    ("a shape of 2^60", "overflows", _shape(1 << 30, 1 << 30), "refused"),
    ("2^60 rows of nothing", "counts them", _shape(1 << 60, 0), "refused"),
    ("a base of 2^63", "moves every address", _put(b"\x89HDF", 24, "Q", 1 << 63), "refused"),
    ("addresses of 255 bytes", "reads past them", _put(b"\x89HDF", 13, "B", 255), "refused"),
]  # fmt: skip
for name, tries, change, verdict in _CHANGES:
    add("keras", f"file: {name}", tries, partial(_changed, change), verdict)

_INDEXES: list[tuple[str, str, dict[str, object]]] = [
    ("a file that leads out", "reads another file", {"/vars": f"../../{OUTSIDE}/canary"}),
    ("an absolute file", "reads another file", {"/vars": "/etc/passwd"}),
    ("the index itself", "has no end", {"/vars": "x.weights.json"}),
    ("a number of lists", "is no name", {"/vars": [["x"]]}),
]  # fmt: skip
for name, tries, weights in _INDEXES:
    add("keras", f"index: {name}", tries, partial(_index, weights))
add("keras", "archive: weights that expand 1,000 times", "fills the memory", _packed)
