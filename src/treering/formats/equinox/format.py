"""Equinox's files: `.npy` records one after another, without names, often after a line of JSON.

Only a template says which record is which leaf. The records are named by their numbers.
"""

from collections.abc import Collection, Sequence
from typing import Any

from ..._core.source import Source
from ...errors import MismatchError
from ...stores.read_errors import refusal
from ...stores.store import Store
from .schema import NAME, SUFFIX, line_before


class Equinox:
    """See `treering.formats.Format`.

    Metadata is the line of JSON before the records. A program that reads such a file with Equinox calls ``readline``
    first; without metadata there is no such line. Step and metrics have no place in the format. None, functions, text
    and bytes are not written: Equinox takes them from the template. Text and bytes that are left out are logged.
    """

    name = NAME
    suffixes = (SUFFIX,)
    boxes: tuple[str, ...] = ()

    def refuses(self, store: Store, path: str) -> str | None:
        try:
            found = store.stat(path)
            if found is None or not found.is_file:
                return "there is nothing" if found is None else "not a file"
            line_before(store, path)
        except ValueError as error:
            return str(error)
        except OSError as error:
            return refusal(error, path)
        return None

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
