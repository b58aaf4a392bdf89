"""Equinox's files: consecutive `.npy` records without names, often after a line of JSON.

Only a template tells which leaf a record belongs to. Without one, a record is named by its number.
"""

import json
from collections.abc import Collection
from typing import Any

from ..._core.source import Source
from ...errors import CorruptError, MismatchError
from ...stores.file_io import opened
from ...stores.read_errors import reading
from ...stores.store import Store
from .._shared.format_parts import FormatDefaults, refuses_file
from .._shared.unknown_files import NPY_MAGIC as MAGIC

_SUFFIX = ".eqx"
MAX_LINE_BYTES = 1 << 20  # bytes of the line of JSON; longer lines are not recognized


class Equinox(FormatDefaults):
    """Implements `treering.formats.Format` for Equinox's files.

    Metadata is the line of JSON before the records; without metadata there is no line. A program that reads a file with
    such a line with Equinox calls ``readline`` first. The format cannot store step and metrics. None, functions, text
    and bytes are not written, because Equinox takes them from the template. Treering logs which text and bytes it left
    out.
    """

    name = "equinox"
    suffixes = (_SUFFIX,)

    def refuses(self, store: Store, path: str) -> str | None:
        def examine() -> str | None:
            try:
                line_before(store, path)
            except ValueError as error:
                return str(error)

        return refuses_file(store, path, examine)

    def open(self, store: Store, path: str) -> Source:
        from .files import EquinoxReader

        try:
            metadata, begin = line_before(store, path)
        except ValueError as error:
            raise CorruptError(f"{path}: expected a file of Equinox: {error}") from None
        return EquinoxReader(store, path, metadata, begin)

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        return ("metadata",)

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        from .files import write

        if options:
            raise MismatchError(f"equinox: expected no options, found {', '.join(options)}")
        return write(store, path, contents, overwrite=overwrite)


FORMAT = Equinox()


def line_before(store: Store, path: str) -> tuple[Any, int]:
    """Returns the value of the line of JSON, and the offset of the records. Raises `ValueError` for other files."""
    begin = _begin(store, path, len(MAGIC))
    if begin.startswith(MAGIC):
        return None, 0
    if begin[:1] not in b'{["0123456789-tfnNI':
        raise ValueError("it begins neither with an .npy record nor with a line of JSON")
    begin = _begin(store, path, MAX_LINE_BYTES)
    line, end, rest = begin.partition(b"\n")
    if not rest and not path.endswith(_SUFFIX):
        raise ValueError(f"it has no .npy record, and its name does not end in {_SUFFIX}")
    if not begin:
        return None, 0
    if not end or not MAGIC.startswith(rest[: len(MAGIC)]):
        raise ValueError(f"no .npy record follows its first line, of at most {MAX_LINE_BYTES} bytes")
    try:
        return json.loads(line), len(line) + 1
    except (ValueError, RecursionError):
        raise ValueError("its first line is not JSON") from None


def _begin(store: Store, path: str, size: int) -> bytes:
    with reading(path), opened(store, path) as blob:
        return blob.read_up_to(size)
