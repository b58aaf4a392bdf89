"""Equinox's files: `.npy` records one after another, without names, often after a line of JSON.

Which record is which leaf only a template tells. The records are named by their numbers.
"""

import json
import stat
from collections.abc import Collection, Sequence
from typing import Any

from ..errors import MismatchError
from ..stores.disk import Disk
from ..stores.on_disk import opened
from ..stores.reading import reading, refusal
from . import Reader

MAGIC = b"\x93NUMPY"
SUFFIX = ".eqx"
_LINE = 1 << 20  # bytes; longer lines are not looked for


class Equinox:
    """See `treering.formats.Format`.

    Metadata is the line of JSON before the records. Who reads such a file with Equinox calls `readline` first; without
    metadata there is no such line. Step and metrics have no place in the format. Of None, functions, text and bytes
    nothing is written: Equinox takes them from the template. Text and bytes that are left out are logged.
    """

    name = "equinox"
    suffixes = (SUFFIX,)
    boxes: tuple[str, ...] = ()

    def refuses(self, disk: Disk, path: str) -> str | None:
        try:
            found = disk.stat(path)
            if found is None or not stat.S_ISREG(found.st_mode):
                return "there is nothing" if found is None else "not a file"
            line_before(disk, path)
        except ValueError as error:
            return str(error)
        except OSError as error:
            return refusal(error, path)
        return None

    def open(self, disk: Disk, path: str) -> Reader:
        from .equinox_read import EquinoxReader

        return EquinoxReader(disk, path)

    def steps(self, disk: Disk, folder: str, names: Sequence[str]) -> dict[int, str]:
        return {}

    def keeps(self, path: str, contents: Reader) -> Collection[str]:
        return ("metadata",)

    def write(self, disk: Disk, path: str, contents: Reader, *, overwrite: bool, **options: Any) -> int:
        from .equinox_write import write

        if options:
            raise MismatchError(f"equinox: expected no options, found {', '.join(options)}")
        return write(disk, path, contents, overwrite=overwrite)


FORMAT = Equinox()


def line_before(disk: Disk, path: str) -> tuple[Any, int]:
    """What the line of JSON says, and where the records begin. Raises `ValueError` for a file of another kind."""
    begin = _begin(disk, path, len(MAGIC))
    if begin.startswith(MAGIC):
        return None, 0
    if begin[:1] not in b'{["0123456789-tfnNI':
        raise ValueError("it begins neither with an .npy record nor with a line of JSON")
    begin = _begin(disk, path, _LINE)
    line, end, rest = begin.partition(b"\n")
    if not rest and not path.endswith(SUFFIX):
        raise ValueError(f"it has no .npy record, and is not called *{SUFFIX}")
    if not begin:
        return None, 0
    if not end or not MAGIC.startswith(rest[: len(MAGIC)]):
        raise ValueError(f"no .npy record follows its first line, of at most {_LINE} bytes")
    try:
        return json.loads(line), len(line) + 1
    except (ValueError, RecursionError):
        raise ValueError("its first line is not JSON") from None


def _begin(disk: Disk, path: str, size: int) -> bytes:
    buffer = bytearray(size)
    with reading(path), opened(disk, path) as fd:
        return bytes(buffer[: disk.read(fd, memoryview(buffer), 0)])
