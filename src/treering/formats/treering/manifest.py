"""The manifest of format version 1: ``treering.json``. `docs/format.md` specifies it."""

import datetime
import json
import math
import re
from typing import Annotated, Any, NoReturn

import msgspec
import xxhash

from ..._catalogue import ArrayEntry, ValueEntry
from ..._sharding import Box
from ..._tree import Node
from ...errors import CorruptError, UnsafeError, UnsupportedError
from ..safetensors import unique

FORMAT = "treering"
VERSION = 1
BLOCK = 1 << 20  # bytes of an array file's buffer per checksum
_NAME = re.compile("[^\0\ud800-\udfff]{1,255}", re.DOTALL)
_TAIL = len(',"xxh3":"0123456789abcdef"}\n')


class ArrayRow(ArrayEntry, array_like=True, tag_field="leaf", tag="array", frozen=True, gc=False):
    """An array leaf and where its pieces are.

    `where` is the number of the one file that holds it whole; or a layout and a turn, by which the holders
    of replicated pieces rotate; or the path of an earlier leaf that is the very same array.
    """

    where: int | tuple[int, int] | str = 0


class Layout(msgspec.Struct, frozen=True, omit_defaults=True):
    """How arrays of one shape and sharding are cut: `files[i]` lists the files that may hold the piece `boxes[i]`."""

    boxes: list[Box]
    files: list[list[int]]
    sharding: dict[str, Any] | None = None


class File(msgspec.Struct, frozen=True):
    """An array file: its size, and the size and checksum of everything before the tensors."""

    name: str
    size: Annotated[int, msgspec.Meta(ge=0)]
    header: Annotated[int, msgspec.Meta(ge=0)]
    xxh3: str


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Everything about a checkpoint but the arrays themselves."""

    format: str
    version: int
    requires: list[str] = []
    created: str
    software: dict[str, str]
    step: int | None = None
    metrics: dict[str, float | str] = {}
    metadata: Any = None
    files: list[File]
    layouts: list[Layout] = []
    tree: list[Node | int]
    leaves: list[ArrayRow | ValueEntry]


def piece_key(path: str, box: Box | None) -> str:
    """The name of a piece in its array file: the leaf's path, with where the piece begins unless it is whole."""
    if box is None and path != "__metadata__":
        return path
    return path + "~@" + ",".join(str(start) for start, _ in box or ())


class Summary(msgspec.Struct, frozen=True):
    """The parts of a manifest that managing a run takes; read without parsing the rest."""

    format: str
    version: int
    created: str
    files: list[File]
    requires: list[str] = []
    step: int | None = None
    metrics: dict[str, float | str] = {}

    def created_seconds(self) -> float:
        """When it was committed, in seconds since the epoch. Raises `CorruptError`."""
        return as_utc(self.created).timestamp()


def as_utc(text: str) -> datetime.datetime:
    """A time as manifests have it; without an offset it is taken for UTC. Raises `CorruptError`."""
    try:
        time = datetime.datetime.fromisoformat(text)
        return time.replace(tzinfo=time.tzinfo or datetime.UTC).astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        raise CorruptError(f"manifest: {text!r:.100} is not a time") from None


def xxh3(data: Any) -> str:
    """A checksum as it is written everywhere: 16 hexadecimal digits of XXH3-64."""
    return xxhash.xxh3_64_hexdigest(data)


def seal(content: msgspec.Struct) -> bytes:
    """The bytes of a file with this content, its own checksum at the end."""
    body = msgspec.json.encode(content)[:-1]
    return body + b',"xxh3":"' + xxh3(body).encode() + b'"}\n'


def check(data: bytes, name: str) -> None:
    """Raises `CorruptError` unless the bytes are those that were written."""
    body, tail = data[:-_TAIL], data[-_TAIL:]
    if len(data) < _TAIL or not tail.startswith(b',"xxh3":"') or not tail.endswith(b'"}\n'):
        raise CorruptError(f"{name}: expected a manifest that ends in its checksum, found it cut short or changed")
    if tail[9:25] != xxh3(body).encode():
        raise CorruptError(f"{name}: the manifest's checksum does not fit its bytes; it is damaged")


def decode(data: bytes, name: str) -> Manifest:
    """Parses the file. Raises `CorruptError`, or `UnsupportedError` for a later version."""
    check(data, name)
    try:
        top = json.loads(data, object_pairs_hook=unique, parse_constant=_refuse, parse_float=_finite)
        _check_common(msgspec.convert(top, Summary), name)  # first: of a later version the rest may look otherwise
        manifest = msgspec.convert(top, Manifest)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise CorruptError(f"{name}: not a manifest of this format: {error}") from None
    return manifest


def summarize(data: bytes, name: str) -> Summary:
    """Checks the bytes and parses a few fields. Raises `CorruptError`."""
    check(data, name)
    try:
        summary = msgspec.json.decode(data, type=Summary)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{name}: not a manifest of this format: {error}") from None
    _check_common(summary, name)
    return summary


def _check_common(summary: Summary, name: str) -> None:
    if summary.format != FORMAT:
        raise CorruptError(f"{name}: not a manifest of this format")
    if summary.version > VERSION or summary.requires:
        found = f"version {summary.version}" if summary.version > VERSION else ", ".join(summary.requires)
        raise UnsupportedError(
            f"{name}: expected format version {VERSION} without further features, found {found}; a later release "
            "wrote it, upgrade treering to read it"
        )
    for file in summary.files:
        if "/" in file.name or "\\" in file.name or file.name in ("", ".", "..") or not _NAME.fullmatch(file.name):
            raise UnsafeError(f"{name}: {file.name!r:.100} is not the name of a file beside the manifest")
    if len({file.name for file in summary.files}) != len(summary.files):
        raise CorruptError(f"{name}: one array file is listed twice")


def file_names(data: bytes) -> list[str]:
    """The names of the array files."""
    return [file.name for file in summarize(data, "manifest").files]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond a double")
    return value
