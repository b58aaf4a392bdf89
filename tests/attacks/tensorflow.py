"""Attacks on TensorFlow: false tables with right checksums, and entries that point elsewhere."""

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from treering.formats.tensorflow.table import crc32c, masked

from . import OUTSIDE, Verdict, add
from .subjects import SUBJECTS

_MAGIC = bytes.fromhex("57fb808b247547db")


def _bundle(change: Callable[[Any], None], folder: Path) -> Path:
    """Saves a checkpoint whose entries are changed before the table is written."""
    from tensorflow_bundles import Bundle

    bundle = Bundle()
    bundle.add("weight", np.arange(1, 13, dtype=np.float32).reshape(3, 4))
    change(bundle)
    bundle.save(folder / "model.ckpt-3")
    return folder / "model.ckpt-3"


def _entry(*fields: tuple[int, Any]) -> Callable[[Any], None]:
    """Returns a change that adds an entry with these fields."""

    def change(bundle: Any) -> None:
        from tensorflow_bundles import field

        known = {1: 1, 2: _shape(12), 4: 0, 5: 48}
        bundle.pairs[b"x"] = b"".join(field(n, value) for n, value in {**known, **dict(fields)}.items())

    return change


def _shape(*sizes: int) -> bytes:
    from tensorflow_bundles import shape_of

    return shape_of(sizes)


def _text_of(shape: tuple[int, ...]) -> Callable[[Any], None]:
    def change(bundle: Any) -> None:
        bundle.add_text("text", [], shape)

    return change


def _key(key: bytes) -> Callable[[Any], None]:
    def change(bundle: Any) -> None:
        bundle.pairs[key] = bundle.pairs[b"weight"]

    return change


def _header(data: bytes) -> Callable[[Any], None]:
    def change(bundle: Any) -> None:
        bundle.pairs[b""] = data

    return change


def _table(blocks: Callable[[Any], bytes], folder: Path, size: int = 0) -> Path:
    path = SUBJECTS["tensorflow"](folder)
    index = Path(f"{path}.index")
    index.unlink()
    import tensorflow_bundles

    data = blocks(tensorflow_bundles)
    index.write_bytes(data)
    if size:
        with index.open("r+b") as file:
            file.truncate(size - 48)
            file.seek(0, 2)
            file.write(data[-48:])
    return path


def _sealed(body: bytes) -> bytes:
    return body + struct.pack("<I", masked(crc32c(body)))


def _one_block(contents: bytes, kind: int = 0) -> Callable[[Any], bytes]:
    """Returns a maker of a table whose only block of entries has these contents."""

    def make(tf: Any) -> bytes:
        data = _sealed(contents + bytes([kind]))
        empty, at = _sealed(tf.data_block([], 1) + b"\0"), len(data)
        index = _sealed(tf.data_block([(b"z", tf.varint(0) + tf.varint(len(contents)))], 1) + b"\0")
        footer = b"".join(map(tf.varint, (at, len(empty) - 5, at + len(empty), len(index) - 5)))
        return data + empty + index + footer.ljust(40, b"\0") + _MAGIC

    return make


def _pointing(offset: int, length: int) -> Callable[[Any], bytes]:
    """Returns a maker of a table whose footer points there."""
    return lambda tf: b"".join(map(tf.varint, (offset, length) * 2)).ljust(40, b"\0") + _MAGIC


def _growing(tf: Any) -> bytes:
    """Makes a block of keys that each repeat the 60,000 bytes of the key before, and one more."""
    key = tf.varint(0) + tf.varint(60_000) + tf.varint(0) + b"k" * 60_000
    more = b"".join(tf.varint(60_000 + n) + tf.varint(1) + tf.varint(0) + b"k" for n in range(5_000))
    return _one_block(key + more + struct.pack("<2I", 0, 1))(tf)


_HUGE = _one_block(b"\xff\xff\xff\xff\x0f" + b"\0a", 1)
_BUNDLES: list[tuple[str, str, Callable[[Any], None], Verdict]] = [
    ("a shape larger than the bytes", "reads past them", lambda bundle: _entry((2, _shape(1000)))(bundle), "refused"),
    ("an offset beyond the file", "reads past it", _entry((4, 1 << 40)), "refused"),
    ("an offset below zero", "reads before it", _entry((4, 2**64 - 48)), "refused"),
    ("a size below zero", "goes backwards", _entry((5, 2**64 - 48)), "refused"),
    ("a file that is not there", "opens another", _entry((3, 1)), "refused"),
    ("a file below zero", "opens another", _entry((3, 2**64 - 1)), "refused"),
    ("an unknown dtype", "is looked up", _entry((1, 999)), "refused"),
    ("a resource", "is a handle of TensorFlow's", _entry((1, 20)), "refused"),
    ("a checksum that is wrong", "is ignored", _entry((4, 4), (5, 44)), "refused"),
    ("a text of no elements in 2^50 rows", "counts all rows first", _text_of((0, 2**50)), "harmless"),
    ("a text of no elements in 10^8 rows", "counts all rows first", _text_of((0, 10**8)), "harmless"),
    ("a name that leads out", "is used as the name of a file", _key(f"../{OUTSIDE}/canary".encode()), "harmless"),
    ("a name that is no UTF-8", "cannot be decoded", _key(b"\xff\xfe"), "refused"),
    ("a name with NUL", "ends early", _key(b"a\0b"), "harmless"),
    ("a name of 5000 levels", "uses up the stack", _key(b"/".join([b"a"] * 5000)), "harmless"),
    ("a header of 2^63 files", "opens them all", _header(b"\x08" + b"\xff" * 8 + b"\x7f"), "refused"),
    ("a header of no files", "divides by zero", _header(b"\x08\0"), "refused"),
    ("a header that is none", "is unpacked", _header(b"\xff" * 20), "refused"),
    ("no header", "is assumed", lambda bundle: bundle.pairs.pop(b""), "refused"),
]  # fmt: skip
_TABLES: list[tuple[str, str, Callable[[Any], bytes], int, Verdict]] = [
    ("a block of 50 GB in holes", "is read at once", _pointing(0, 50 << 30), 100 << 30, "refused"),
    ("a block of 1 GB in holes", "is read at once", _pointing(0, 1 << 30), 2 << 30, "refused"),
    ("a block beyond the file", "is read", _pointing(1 << 40, 100), 0, "refused"),
    ("a block of 2^64 bytes", "overflows", _pointing(0, 2**64 - 1), 0, "refused"),
    ("keys that grow", "multiplies a long key", _growing, 0, "refused"),
    ("keys that grow, in a file of holes", "multiplies a long key", _growing, 100 << 30, "refused"),
    ("a block that grows to 4 GB", "is made room for", _HUGE, 0, "refused"),
    ("a block compressed in another way", "is taken as it is", _one_block(b"abcd", 7), 0, "refused"),
    ("a block with more restarts than bytes", "goes backwards", _one_block(struct.pack("<I", 2**32 - 1)), 0, "refused"),
]  # fmt: skip

for name, tries, change, verdict in _BUNDLES:
    add("tensorflow", f"entry: {name}", tries, partial(_bundle, change), verdict)
for name, tries, blocks, size, verdict in _TABLES:
    add("tensorflow", f"table: {name}", tries, partial(_table, blocks, size=size), verdict)


def _latest(name: str, folder: Path) -> Path:
    """Makes a folder whose file `checkpoint` names a checkpoint outside as the latest."""
    path = folder / "run"
    path.mkdir()
    SUBJECTS["tensorflow"](folder.parent / OUTSIDE)
    (path / "checkpoint").write_text(f'model_checkpoint_path: "{name}"\n')
    return path


for name in (f"../../{OUTSIDE}/model.ckpt-3", "/etc/passwd", "..", "\0", "x" * 5000, ""):
    add("tensorflow", f"latest: {name!r:.30}", "opens another checkpoint", partial(_latest, name))
