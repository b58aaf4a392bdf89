"""Attacks on files of PyTorch: pickles that would run code or fill the memory, and archives that point elsewhere."""

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import OUTSIDE, Verdict, add

_FLAT = np.arange(1, 13, dtype=np.float32)


def _pickle(data: bytes, folder: Path) -> Path:
    """Packs a pickle as PyTorch does."""
    from torch_files import archive

    path = folder / "x.pt"
    path.write_bytes(archive(None, change=lambda files: files.update({"data.pkl": data})))
    return path


def _metadata(data: bytes, folder: Path) -> Path:
    path = folder / "x"
    path.mkdir()
    (path / ".metadata").write_bytes(data)
    return path


def _view(shape: tuple[int, ...], strides: tuple[int, ...], offset: int, folder: Path) -> Path:
    from torch_files import View, archive

    path = folder / "x.pt"
    path.write_bytes(archive({"w": View(_FLAT, shape, strides, offset)}))
    return path


def _patched(change: Callable[[bytes], bytes], folder: Path) -> Path:
    from torch_files import archive, tensor

    path = folder / "x.pt"
    path.write_bytes(change(archive({"weight": tensor(_FLAT)})))
    return path


def _distributed(change: Callable[[Any], None], folder: Path) -> Path:
    from torch_files import Distributed

    saved = Distributed()
    saved.add(["weight"], _FLAT.reshape(3, 4))
    change(saved)
    return saved.save(folder / "x")


def _range(**change: Any) -> Callable[[Any], None]:
    return lambda saved: next(iter(saved.ranges.values())).state.update(change)


def _many_values(saved: Any) -> None:
    """Makes 20,000 values of one range of a file."""
    saved.add_value(["v"], list(range(1000)))
    last = list(saved.ranges.items())[-1]
    from torch_files import CHECKPOINT, Call

    for n in range(20_000):
        saved.leaves[f"v{n}"] = saved.leaves["v"]
        saved.ranges[Call(CHECKPOINT, "MetadataIndex", state={"fqn": f"v{n}"})] = last[1]


def _off_grid(saved: Any) -> None:
    """Makes a tensor of 20,000 chunks that form no grid."""
    array = np.zeros((20_000, 2), np.int8)
    boxes = [((n, n + 1), (0, 2)) for n in range(19_999)] + [((19_999, 20_000), (n, n + 1)) for n in (0, 1)]
    saved.add(["weight"], array[:0], [])
    about = saved.leaves["weight"].state
    from torch_files import CHECKPOINT, Call, size

    about["size"] = size(array.shape)
    place = Call("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    place.state = {"relative_path": "__0_0.distcp", "offset": 0, "length": 100}
    for box in boxes:
        offset, lengths = size([start for start, _ in box]), size([stop - start for start, stop in box])
        about["chunks"].append(Call(CHECKPOINT, "ChunkStorageMetadata", state={"offsets": offset, "sizes": lengths}))
        saved.ranges[Call(CHECKPOINT, "MetadataIndex", state={"fqn": "weight", "offset": offset})] = place


def _laughs(levels: int) -> bytes:
    made = b"]q\0Na"
    for n in range(levels):
        made += b"0]q" + bytes([n + 1]) + b"(" + (b"h" + bytes([n])) * 10 + b"e"
    return b"\x80\x02" + made + b"."


def _directory(number: int, at: int, code: str) -> Callable[[bytes], bytes]:
    """Returns a change of a field of the last entry in the central directory, which is that of the version."""

    def change(data: bytes) -> bytes:
        place = data.rindex(b"PK\x01\x02") + at
        return data[:place] + struct.pack(code, number) + data[place + struct.calcsize(code) :]

    return change


_RUN = b"cos\nsystem\n(X\x14\0\0\0touch outside-was-runtR."
_PICKLES: list[tuple[str, str, bytes, Verdict]] = [
    ("a call of os.system", "runs a command", b"\x80\x02" + _RUN, "refused"),
    ("a call without a protocol", "runs a command", _RUN, "refused"),
    ("a call of eval as an attribute", "runs code", b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.", "refused"),
    ("a list of lists, 10^30 items", "is multiplied out", _laughs(30), "refused"),
    ("a list in itself", "has no end", b"\x80\x02]q\0h\0a.", "refused"),
    ("10^6 levels of lists", "uses up the stack", b"\x80\x02" + b"]" * 10**6 + b"a" * (10**6 - 1) + b".", "refused"),
    ("10^6 levels of tuples as a key", "uses up the stack", b"\x80\x02})" + b"\x85" * 10**6 + b"Ns.", "refused"),
    ("10^7 dicts in 10 MB", "takes 64 times its size", b"\x80\x02(" + b"}" * 10**7 + b"l.", "refused"),
    ("10^7 copies of one", "takes much room", b"\x80\x02]" + b"2" * 10**7 + b".", "refused"),
    ("a text of 4 GB", "is made room for", b"\x80\x02X\xff\xff\xff\xff.", "refused"),
    ("a number of 2 GB", "is made room for", b"\x80\x02\x8b\xff\xff\xff\x7f.", "refused"),
    ("a number of 8 million bits", "takes quadratic time", b"\x80\x02\x8b\x40\x42\x0f\0" + b"\x7f" * 10**6 + b".", "harmless"),
    ("an extension", "is looked up", b"\x80\x02\x82\x01.", "refused"),
]  # fmt: skip
for name, tries, data, verdict in _PICKLES:
    add("torch", f"pickle: {name}", tries, partial(_pickle, data), verdict)
    add("dcp", f"metadata: {name}", tries, partial(_metadata, data))

_VIEWS: list[tuple[str, str, tuple[Any, ...], Verdict]] = [
    ("a shape larger than the bytes", "reads past them", ((1000,), (1,), 0), "refused"),
    ("strides beyond the bytes", "reads past them", ((3, 4), (8, 1), 0), "refused"),
    ("strides below zero", "goes backwards", ((3,), (-1,), 0), "refused"),
    ("an offset beyond the bytes", "reads past them", ((3,), (1,), 1 << 50), "refused"),
    ("an offset below zero", "reads before them", ((3,), (1,), -3), "refused"),
    ("2^57 copies of one element", "is made room for", ((1 << 57,), (0,), 0), "unread"),
    ("2^60 copies of one element", "overflows", ((1 << 60,), (0,), 0), "refused"),
    ("2^60 rows of nothing", "counts them", ((1 << 60, 0), (1, 1), 0), "refused"),
    ("100 axes", "has no room in NumPy", ((1,) * 100, (1,) * 100, 0), "refused"),
    ("a size of 8,000 bits", "cannot be printed", ((1 << 8000,), (1,), 0), "refused"),
]  # fmt: skip
for name, tries, view, verdict in _VIEWS:
    add("torch", f"tensor: {name}", tries, partial(_view, *view), verdict)

_ARCHIVES: list[tuple[str, str, Callable[[bytes], bytes]]] = [
    ("a member at 4 GB", "reads past the end", _directory(0xFFFFFFF0, 42, "<I")),
    ("a member of 4 GB", "reads past the end", _directory(0xFFFFFFF0, 24, "<I")),
    ("a name of 64 KB", "reads past the end", _directory(0xFFFF, 28, "<H")),
    ("two members of one name", "hides one", lambda data: data.replace(b"archive/version", b"archive/data/0\0")),
    ("a compressed storage", "expands", lambda data: data.replace(b"\x14\x03\x14\0\0\0\0\0", b"\x14\x03\x14\0\0\0\x08\0")),
]  # fmt: skip
for name, tries, change in _ARCHIVES:
    add("torch", f"archive: {name}", tries, partial(_patched, change), "harmless")

_CHECKPOINTS: list[tuple[str, str, Callable[[Any], None], Verdict]] = [
    ("a file that leads out", "reads another file", _range(relative_path=f"../../{OUTSIDE}/canary"), "refused"),
    ("an absolute file", "reads another file", _range(relative_path="/etc/passwd"), "refused"),
    ("a file with NUL", "ends early", _range(relative_path="__0_0.distcp\0x"), "refused"),
    ("an offset beyond the file", "reads past it", _range(offset=1 << 50), "refused"),
    ("an offset below zero", "reads before it", _range(offset=-1), "refused"),
    ("a length of 2^64", "overflows", _range(length=1 << 64), "refused"),
    ("20,000 values of one range", "is multiplied out", _many_values, "refused"),
    ("20,000 chunks off the grid", "are compared with each other", _off_grid, "refused"),
]  # fmt: skip
for name, tries, change, verdict in _CHECKPOINTS:
    add("dcp", f"checkpoint: {name}", tries, partial(_distributed, change), verdict)
