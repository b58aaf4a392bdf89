"""Attacks on any file of any format: something else in its place, or contents that no program writes."""

import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import OUTSIDE, Verdict, add
from .subjects import FILES, SUBJECTS, files


def _replace(file: Path, data: bytes) -> None:
    file.unlink()
    file.write_bytes(data)


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _link(file: Path, target: str) -> None:
    file.unlink()
    file.symlink_to(target)


def _outside(file: Path) -> None:
    place = next(parent for parent in file.parents if (parent / OUTSIDE).exists())
    _link(file, str(place / OUTSIDE / "canary"))


def _longer(file: Path, size: int) -> None:
    file.chmod(0o644)
    os.truncate(file, size)


def _hollow(file: Path, size: int) -> None:
    _replace(file, b"")
    os.truncate(file, size)


def _spread(file: Path, size: int) -> None:
    data = file.read_bytes()
    _replace(file, data)
    os.truncate(file, size)
    with file.open("r+b") as out:
        out.seek(size - len(data))
        out.write(data)


_DIGITS = b"9" * 1_000_000
KINDS: dict[str, tuple[str, Callable[[Path], None], Verdict]] = {
    "pipe": ("makes the reader wait forever", _pipe, "refused"),
    "folder": ("cannot be read as a file", _folder, "refused"),
    "endless device": ("never ends", partial(_link, target="/dev/zero"), "refused"),
    "terminal": ("waits for a user to type", partial(_link, target="/dev/tty"), "refused"),
    "loop of links": ("leads to itself", lambda file: _link(file, file.name), "refused"),
    "link to nowhere": ("leads to nothing", partial(_link, target="nowhere"), "refused"),
    "link to a canary": ("shows a file of another user", _outside, "refused"),
    "nothing in it": ("has no first byte", lambda file: _replace(file, b""), "refused"),
    "10 GB of holes": ("is read entirely and fills the memory", lambda file: _hollow(file, 10 << 30), "refused"),
    "1.9 GB of holes": ("the same, below a limit", lambda file: _hollow(file, 1_900_000_000), "refused"),
    "10 GB appended": ("is large after its beginning", lambda file: _longer(file, 10 << 30), "refused"),
    "10 GB in the middle": ("is valid at its beginning and end", lambda file: _spread(file, 10 << 30), "refused"),
    "a pickle": ("runs code when it is opened", lambda file: _replace(file, _pickled()), "refused"),
    "no UTF-8": ("is text that cannot be decoded", lambda file: _replace(file, b'{"\xff\xfe": "\xed\xa0\x80"}'), "refused"),
    "nested JSON": ("uses up the parser's stack", lambda file: _replace(file, b'{"a":' * 200_000), "refused"),
    "nested lists": ("the same", lambda file: _replace(file, b"[" * 10_000_000), "refused"),
    "a number of a million digits": ("takes quadratic time", lambda file: _replace(file, b'{"step":%s}' % _DIGITS), "refused"),
    "NUL bytes": ("is nothing but NUL", lambda file: _replace(file, bytes(10_000)), "refused"),
}  # fmt: skip


class _Marker:
    """Creates a file when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {OUTSIDE}-was-run",)


def _pickled() -> bytes:
    return pickle.dumps(_Marker())


def _spoilt(subject: str, pattern: str, change: Callable[[Path], None], folder: Path) -> Path:
    path = SUBJECTS[subject](folder)
    for file in files(subject, pattern, path):
        change(file)
    return path


for subject, patterns in FILES.items():
    for pattern in patterns:
        for kind, (tries, change, verdict) in KINDS.items():
            # Readers of databases and of TensorFlow's data only read the parts of a file that something points to.
            loose = (
                kind.startswith("10 GB ")
                and "holes" not in kind
                and pattern in ("d/*", ".data-*", ".index", "__*.distcp")
            )
            loose = loose or (subject, kind) == ("equinox", "nothing in it")  # a valid file: a tree without arrays
            name = f"{pattern or 'the file'}: {kind}"
            add(subject, name, tries, partial(_spoilt, subject, pattern, change), "right" if loose else verdict)
