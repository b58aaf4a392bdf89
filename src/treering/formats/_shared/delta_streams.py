"""What the formats of published weight deltas have in common. `weight_deltas` reads their versions."""

import posixpath
import re
from collections.abc import Collection, Sequence
from typing import Any

from ..._core.source import Source
from ...errors import CorruptError, UnsupportedError
from ...stores.read_errors import refusal
from ...stores.store import Store


class DeltaStream:
    """Implements `treering.formats.Format` for versions in a stream. A complete version is a checkpoint in safetensors.

    prefix, digits: the names of versions are the prefix and at least so many digits.
    """

    name = ""
    suffixes: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()
    prefix = ""
    digits = 0

    def is_delta(self, store: Store, path: str) -> bool:
        """Returns True for a folder of differences. Raises `CorruptError`."""
        raise NotImplementedError

    def refuses(self, store: Store, path: str) -> str | None:
        if self._number_of(posixpath.basename(path)) is None:
            return f"its name is not {self.prefix} and a number"
        try:
            return None if self.is_delta(store, path) else "it is no folder of differences"
        except (CorruptError, OSError) as error:
            return refusal(error, path)

    def open(self, store: Store, path: str) -> Source:
        from .weight_deltas import open_version

        return open_version(self, store, path)

    def read_delta(self, store: Store, path: str) -> Any:
        """Returns the `weight_deltas.Delta` of a version; None for a complete one. Raises `CorruptError`."""
        raise NotImplementedError

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        from ..safetensors.format import FORMAT as SAFETENSORS

        found = {number: name for name in names if (number := self._number_of(name)) is not None}
        return {
            number: name
            for number, name in found.items()
            if any(one.refuses(store, posixpath.join(folder, name)) is None for one in (self, SAFETENSORS))
        }

    def path_of(self, stream: str, number: int) -> str:
        """Returns the path of a version."""
        return posixpath.join(stream, f"{self.prefix}{number:0{self.digits}d}")

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        return ()

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        raise UnsupportedError(
            f"{path}: the format {self.name!r} is only read; publish with treering.Publisher, and keep a directory for "
            "the engine with `treering pull`"
        )

    def _number_of(self, name: str) -> int | None:
        match = re.fullmatch(rf"{self.prefix}([0-9]{{{self.digits},}})", name)
        return int(match[1]) if match else None
