"""Published versions of weights, most of them differences to an earlier one, as slime and SkyRL write them.

slime, miles and vime publish them for SGLang's `/pull_weights`. `deltas` reads the versions of both, `write` writes
them.
"""

import posixpath
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..._core.source import Source
from ..._threads.preload_decoders import preload_decoders
from ...errors import CorruptError, MismatchError
from ...stores.file_io import is_folder, opened, read_file
from ...stores.read_errors import refusal
from ...stores.store import Store
from .._shared import strict_json
from .._shared.format_parts import FormatDefaults
from ..safetensors.folder import SUFFIX, Index, index_of
from ..safetensors.header import decode_header, header_size

if TYPE_CHECKING:
    from .deltas import WrittenDelta

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class DeltaStream(FormatDefaults):
    """Implements `treering.formats.Format` for versions in a stream. A complete version is a checkpoint in safetensors.

    A version is written as the differences to the one before it in its folder.

    prefix, digits: the names of versions are the prefix and at least so many digits.
    mark: the name of the file that makes a folder a delta.
    complete_every: the receivers take complete versions, and so often one is written; None if they take none.
    """

    name = ""
    prefix = ""
    digits = 0
    mark = ""
    complete_every: int | None = None

    def is_delta(self, store: Store, path: str) -> bool:
        """Returns True for a folder of differences. Raises `CorruptError`."""
        raise NotImplementedError

    def is_unfinished(self, store: Store, path: str) -> bool:
        """Returns True for a folder of differences without the file `mark`, which its writer puts there last."""
        if store.stat(posixpath.join(path, self.mark)):
            return False
        files = sorted(name for name in store.list(path) if name.endswith(SUFFIX))
        return bool(files) and _has_differences(store, posixpath.join(path, files[0]))

    def is_complete(self, store: Store, path: str) -> bool:
        """Returns True for a version that is not made from others. Raises `CorruptError`."""
        return self.refuses(store, path) is None and not (self.is_delta(store, path) or self.is_unfinished(store, path))

    def refuses(self, store: Store, path: str) -> str | None:
        from ..safetensors import FORMAT as SAFETENSORS

        if self.number_of(posixpath.basename(path)) is None:
            return f"its name is not {self.prefix} and a number"
        try:
            if not is_folder(store, path, links=True):
                return "it is no folder"
            if self.is_delta(store, path) or self.is_unfinished(store, path):
                return None
            return SAFETENSORS.refuses(store, path)
        except (CorruptError, OSError) as error:
            return refusal(error, path)

    def open(self, store: Store, path: str) -> Source:
        from .deltas import open_version

        return open_version(self, store, path)

    def read_delta(self, store: Store, path: str) -> Any:
        """Returns the `deltas.VersionDelta` of a version; None for a complete one. Raises `CorruptError`."""
        raise NotImplementedError

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        found = {number: name for name in names if (number := self.number_of(name)) is not None}
        paths = {number: posixpath.join(folder, name) for number, name in found.items()}
        return {
            number: name
            for number, name in found.items()
            if self.refuses(store, paths[number]) is None and not self.is_unfinished(store, paths[number])
        }

    def path_of(self, stream: str, number: int) -> str:
        """Returns the path of a version."""
        return posixpath.join(stream, f"{self.prefix}{number:0{self.digits}d}")

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        return ("step",) if contents.step == self.number_of(posixpath.basename(path)) else ()

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        from .write import write_version

        if options:
            raise MismatchError(f"{self.name}: expected no options, found {', '.join(options)}")
        if (number := self.number_of(posixpath.basename(path))) is None:
            example = posixpath.basename(self.path_of("", 7))
            raise MismatchError(
                f"{path}: expected the name of a version, such as {example}, found {posixpath.basename(path)!r}"
            )
        return write_version(self, store, path, number, contents, overwrite=overwrite)

    def file_name(self, number: int, count: int) -> str:
        """Returns the name of one of `count` files of a delta; `number` counts from 0."""
        raise NotImplementedError

    def describe(self, number: int, changes: "Sequence[WrittenDelta]") -> dict[str, Any]:
        """Returns the contents of the file `mark`."""
        raise NotImplementedError

    def number_of(self, name: str) -> int | None:
        """Returns the number of the version with a name; None for a name that receivers do not look for."""
        match = re.fullmatch(rf"{self.prefix}([0-9]{{{self.digits},18}})", name)
        number = int(match[1]) if match else None
        return None if number is None or self.path_of("", number) != name else number


def _has_differences(store: Store, path: str) -> bool:
    """Returns True if a file has only strings of bytes, and the first of them begins as a zstd frame does."""
    try:
        with opened(store, path) as blob:
            header = decode_header(blob.read(0, header_size(blob.read_up_to(8), blob.size, path)), path)
            tensors = header.tensors.values()
            first = min((one.data_offsets[0] for one in tensors), default=0)
            are_bytes = all(one.dtype == "U8" and len(one.shape) == 1 for one in tensors)
            return are_bytes and bytes(blob.read(header.size + first, len(_ZSTD_MAGIC))) == _ZSTD_MAGIC
    except CorruptError:
        return False


class Slime(DeltaStream):
    """Implements `treering.formats.Format` for slime."""

    name = "slime"
    prefix = "weight_v"
    digits = 6
    mark = "model.safetensors.index.json"
    complete_every = 20  # to read version N, all since the last complete one are applied

    def is_delta(self, store: Store, path: str) -> bool:
        return _index(store, path) is not None

    def read_delta(self, store: Store, path: str) -> Any:
        from .deltas import TensorDelta, VersionDelta, check_known

        if (index := _index(store, path)) is None:
            return None
        weights, about = index
        check_known(path, about["delta_encoding"], about.get("compression_format"), about.get("checksum_format"))
        files = [store.stat(posixpath.join(path, name)) for name in dict.fromkeys(weights.values())]
        nbytes = sum(one.nbytes for one in files if one)
        parts = {key: TensorDelta(name, key, about["checksum_format"]) for key, name in weights.items()}
        number, base = (_number(path, about.get(name)) for name in ("version", "base_version"))
        return VersionDelta(path, number, base, about["delta_encoding"], parts, nbytes)

    def file_name(self, number: int, count: int) -> str:
        return f"model-{number:05d}-of-{count:05d}{SUFFIX}"

    def describe(self, number: int, changes: "Sequence[WrittenDelta]") -> dict[str, Any]:
        about = {
            "version": f"{number:06d}",
            "base_version": f"{number - 1:06d}",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        }
        return {"metadata": about, "weight_map": {one.key: one.file for one in changes}}


def _index(store: Store, path: str) -> Index | None:
    """Returns the index of a delta; None for another folder. Raises `CorruptError`."""
    index = posixpath.join(path, Slime.mark)
    there = store.stat(index)
    found = index_of(store, index, deltas=True) if there and there.is_file else None
    return found if found and "delta_encoding" in found.metadata else None


def _number(path: str, text: object) -> int:
    if not (isinstance(text, str) and text.isascii() and text.isdecimal()):
        raise CorruptError(f"{path}: expected the number of a version in digits, found {text!r:.80}")
    return int(text)


SLIME = Slime()


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
    mark = "manifest.json"

    def is_delta(self, store: Store, path: str) -> bool:
        return _manifest(store, path) is not None

    def read_delta(self, store: Store, path: str) -> Any:
        from .deltas import TensorDelta, VersionDelta, check_known

        if (found := _manifest(store, path)) is None:
            return None
        parts: dict[str, TensorDelta] = {}
        for one in found.tensors:
            algorithm = "sha256" if one.checksum is None else one.checksum_algorithm
            check_known(path, "xor", "zstd", algorithm)
            if (checksum := one.checksum or one.sha256) is None:
                raise CorruptError(f"{path}: expected the checksum of {one.name!r}, found none")
            parts[one.name] = TensorDelta(one.payload_file, one.payload_key, algorithm, checksum)
        nbytes = sum(one.compressed_num_bytes for one in found.tensors)
        return VersionDelta(path, found.version, found.base_version, "xor", parts, nbytes)

    def file_name(self, number: int, count: int) -> str:
        return f"delta-rank00000-file{number:06d}{SUFFIX}"

    def describe(self, number: int, changes: "Sequence[WrittenDelta]") -> dict[str, Any]:
        tensors = [
            {
                "name": one.key,
                "dtype": one.entry.dtype,
                "shape": one.entry.shape,
                "uncompressed_num_bytes": one.entry.nbytes,
                "compressed_num_bytes": one.nbytes,
                "payload_file": one.file,
                "payload_key": one.key,
                "checksum": one.checksum,
                "checksum_algorithm": "xxh3-128",
            }
            for one in changes
        ]
        return {
            "version": number,
            "base_version": number - 1,
            "tensors": tensors,
            "total_uncompressed_num_bytes": sum(one.entry.nbytes for one in changes),
            "total_compressed_num_bytes": sum(one.nbytes for one in changes),
            "payload_files": [*dict.fromkeys(one.file for one in changes)],
        }


def _manifest(store: Store, path: str) -> _Manifest | None:
    """Returns the manifest of a delta; None without one. Raises `CorruptError`."""
    place = posixpath.join(path, SkyRL.mark)
    there = store.stat(place)
    if there is None or not there.is_file:
        return None
    try:
        return msgspec.convert(strict_json.parse(read_file(store, place)), _Manifest)
    except strict_json.MALFORMED as error:
        raise CorruptError(f"{place}: expected the manifest of a delta: {error}") from None


SKYRL = SkyRL()
