"""Versions of weights as slime, miles and vime publish them for SGLang's `/pull_weights`."""

import posixpath
import re
from collections.abc import Collection, Sequence
from typing import Any

from ..._core.source import Source
from ...errors import CorruptError, UnsupportedError
from ...stores.read_errors import refusal
from ...stores.store import Store
from ..safetensors.folder import Index, index_of

INDEX = "model.safetensors.index.json"
_NAME = re.compile(r"weight_v(\d{6,})")


class Slime:
    """Implements `treering.formats.Format` for slime. A complete version is a checkpoint in safetensors."""

    name = "slime"
    suffixes: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()

    def refuses(self, store: Store, path: str) -> str | None:
        if not _NAME.fullmatch(posixpath.basename(path)):
            return "its name is not weight_v and a number"
        try:
            return None if _index(store, path) else f"there is no {INDEX} of a delta"
        except (CorruptError, OSError) as error:
            return refusal(error, path)

    def open(self, store: Store, path: str) -> Source:
        from .._shared.weight_deltas import open_version

        return open_version(self, store, path)

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        from ..safetensors.format import FORMAT as SAFETENSORS

        found = {int(match[1]): name for name in names if (match := _NAME.fullmatch(name))}
        formats = (self, SAFETENSORS)
        return {
            number: name
            for number, name in found.items()
            if any(one.refuses(store, posixpath.join(folder, name)) is None for one in formats)
        }

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        return ()

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        raise UnsupportedError(
            f"{path}: the format {self.name!r} is only read; publish with treering.Publisher, and keep a directory for "
            "the engine with `treering pull`"
        )

    def path_of(self, stream: str, number: int) -> str:
        return posixpath.join(stream, f"weight_v{number:06d}")

    def read_delta(self, store: Store, path: str) -> Any:
        from .._shared.weight_deltas import Delta, Part, check_known

        if (index := _index(store, path)) is None:
            return None
        weights, about = index
        check_known(path, about["delta_encoding"], about.get("compression_format"), about.get("checksum_format"))
        files = [store.stat(posixpath.join(path, name)) for name in dict.fromkeys(weights.values())]
        nbytes = sum(one.nbytes for one in files if one)
        parts = {key: Part(name, key, about["checksum_format"]) for key, name in weights.items()}
        number, base = (_number(path, about.get(name)) for name in ("version", "base_version"))
        return Delta(path, number, base, about["delta_encoding"], parts, nbytes)


def _index(store: Store, path: str) -> Index | None:
    """Returns the index of a delta; None for another folder. Raises `CorruptError`."""
    index = posixpath.join(path, INDEX)
    there = store.stat(index)
    found = index_of(store, index, deltas=True) if there and there.is_file else None
    return found if found and "delta_encoding" in found.metadata else None


def _number(path: str, text: object) -> int:
    if not (isinstance(text, str) and text.isascii() and text.isdecimal()):
        raise CorruptError(f"{path}: expected the number of a version in digits, found {text!r:.80}")
    return int(text)


FORMAT = Slime()
