"""Versions of weights as slime, miles and vime publish them for SGLang's `/pull_weights`."""

import posixpath
from typing import Any

from ...errors import CorruptError
from ...stores.store import Store
from .._shared.delta_streams import DeltaStream
from ..safetensors.folder import Index, index_of

INDEX = "model.safetensors.index.json"


class Slime(DeltaStream):
    """Implements `treering.formats.Format` for slime."""

    name = "slime"
    prefix = "weight_v"
    digits = 6

    def is_delta(self, store: Store, path: str) -> bool:
        return _index(store, path) is not None

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
