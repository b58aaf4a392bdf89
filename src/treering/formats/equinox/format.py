"""Equinox's files: consecutive `.npy` records without names, often after a line of JSON.

Only a template tells which leaf a record belongs to. Without one, a record is named by its number.
"""

from collections.abc import Collection, Sequence
from typing import Any

from ..._core.source import Source
from ...errors import MismatchError
from ...stores.store import Store
from .._shared.format_parts import refuses_file
from .schema import NAME, SUFFIX, line_before


class Equinox:
    """Implements `treering.formats.Format` for Equinox's files.

    Metadata is the line of JSON before the records; without metadata there is no line. A program that reads a file with
    such a line with Equinox calls ``readline`` first. The format cannot store step and metrics. None, functions, text
    and bytes are not written, because Equinox takes them from the template. Treering logs which text and bytes it left
    out.
    """

    name = NAME
    suffixes = (SUFFIX,)
    boxes: tuple[str, ...] = ()

    def refuses(self, store: Store, path: str) -> str | None:
        def examine() -> str | None:
            try:
                line_before(store, path)
            except ValueError as error:
                return str(error)

        return refuses_file(store, path, examine)

    def open(self, store: Store, path: str) -> Source:
        from .read import EquinoxReader

        return EquinoxReader(store, path)

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        return {}

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        return ("metadata",)

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        from .write import write

        if options:
            raise MismatchError(f"equinox: expected no options, found {', '.join(options)}")
        return write(store, path, contents, overwrite=overwrite)


FORMAT = Equinox()
