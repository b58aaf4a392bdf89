"""Versions of weights as SkyRL publishes them."""

import posixpath
import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from ..._core.source import Source
from ..._threads.preload_decoders import preload_decoders
from ...errors import CorruptError, UnsupportedError
from ...stores.file_io import read_file
from ...stores.read_errors import refusal
from ...stores.store import Store
from .._shared import strict_json

MANIFEST = "manifest.json"
_NAME = re.compile(r"delta-(\d{8,})")


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


class SkyRL:
    """Implements `treering.formats.Format` for SkyRL."""

    name = "skyrl"
    suffixes: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()

    def refuses(self, store: Store, path: str) -> str | None:
        if not _NAME.fullmatch(posixpath.basename(path)):
            return "its name is not delta- and a number"
        try:
            return None if _manifest(store, path) else f"there is no {MANIFEST}"
        except (CorruptError, OSError) as error:
            return refusal(error, path)

    def open(self, store: Store, path: str) -> Source:
        from .._shared.weight_deltas import open_version

        return open_version(self, store, path)

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        found = {int(match[1]): name for name in names if (match := _NAME.fullmatch(name))}
        return {
            number: name for number, name in found.items() if self.refuses(store, posixpath.join(folder, name)) is None
        }

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        return ()

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        raise UnsupportedError(
            f"{path}: the format {self.name!r} is only read; publish with treering.Publisher, and keep a directory for "
            "the engine with `treering pull`"
        )

    def path_of(self, stream: str, number: int) -> str:
        return posixpath.join(stream, f"delta-{number:08d}")

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
