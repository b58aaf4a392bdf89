"""Versions of weights as SkyRL publishes them."""

import posixpath
from typing import Any

import msgspec

from ..._threads.preload_decoders import preload_decoders
from ...errors import CorruptError
from ...stores.file_io import read_file
from ...stores.store import Store
from .._shared import strict_json
from .._shared.delta_streams import DeltaStream

MANIFEST = "manifest.json"


class _Tensor(msgspec.Struct):
    name: str
    payload_file: str
    payload_key: str
    checksum: str | None = None
    checksum_algorithm: str = "xxh3-128"
    sha256: str | None = None  # in place of `checksum`, as SkyRL wrote it at first
    compressed_num_bytes: int = 0


class _Manifest(msgspec.Struct):
    version: int
    base_version: int
    payload_files: list[str]
    tensors: list[_Tensor] = []


preload_decoders(_Manifest)


class SkyRL(DeltaStream):
    """Implements `treering.formats.Format` for SkyRL."""

    name = "skyrl"
    prefix = "delta-"
    digits = 8

    def is_delta(self, store: Store, path: str) -> bool:
        return _manifest(store, path) is not None

    def read_delta(self, store: Store, path: str) -> Any:
        from .._shared.weight_deltas import Delta, Part, check_known

        if (found := _manifest(store, path)) is None:
            return None
        parts: dict[str, Part] = {}
        for one in found.tensors:
            algorithm = "sha256" if one.checksum is None else one.checksum_algorithm
            check_known(path, "xor", "zstd", algorithm)
            if (checksum := one.checksum or one.sha256) is None:
                raise CorruptError(f"{path}: expected the checksum of {one.name!r}, found none")
            parts[one.name] = Part(one.payload_file, one.payload_key, algorithm, checksum)
        nbytes = sum(one.compressed_num_bytes for one in found.tensors)
        return Delta(path, found.version, found.base_version, "xor", parts, nbytes)


def _manifest(store: Store, path: str) -> _Manifest | None:
    """Returns the manifest of a delta; None without one. Raises `CorruptError`."""
    place = posixpath.join(path, MANIFEST)
    there = store.stat(place)
    if there is None or not there.is_file:
        return None
    try:
        return msgspec.convert(strict_json.parse(read_file(store, place)), _Manifest)
    except strict_json.MALFORMED as error:
        raise CorruptError(f"{place}: expected the manifest of a delta: {error}") from None


FORMAT = SkyRL()
