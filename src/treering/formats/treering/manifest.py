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


class _Envelope(msgspec.Struct, frozen=True):
    """What no version will ever change about a sealed file, and who wrote it; of whatever types they are."""

    format: Any = None
    version: Any = None
    requires: Any = ()
    software: Any = None


class Summary(msgspec.Struct, frozen=True):
    """The parts of a manifest that managing a run takes; read without parsing the rest."""

    created: str
    files: list[File]
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


def check_envelope(data: bytes, name: str, format: str = FORMAT, *, default: Any = None) -> None:
    """Raises `UnsupportedError` unless a sealed file is of a format and version that this release reads.

    To be called when the seal is known to be right, and before anything else in the file is looked at: what a later
    release wrote is no damage, however it may look. `default` is the version of files that do not say theirs.
    """
    try:
        found = msgspec.json.decode(data, type=_Envelope)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _unsupported(name, f"what is not understood ({error})", None) from None
    version = default if found.version is None else found.version
    if found.format != format and not (found.format is None and default is not None):
        raise _unsupported(name, f"the format {found.format!r:.100}", found.software)
    if type(version) is not int or version != VERSION:
        raise _unsupported(name, f"version {version!r:.100}", found.software)
    if found.requires != () and found.requires != []:
        features = found.requires if isinstance(found.requires, list) else [found.requires]
        listed = ", ".join(feature if isinstance(feature, str) else repr(feature) for feature in features[:5])
        raise _unsupported(name, f"that it requires {listed:.200}", found.software)


def _unsupported(name: str, found: str, software: Any) -> UnsupportedError:
    release = software.get("treering") if isinstance(software, dict) else None
    writer = (
        f"treering {release} wrote it" if type(release) is str and release.isprintable() else "a later one wrote it"
    )
    return UnsupportedError(
        f"{name}: expected format version {VERSION} without further features, which is all that this release reads, "
        f"found {found}; it is undamaged: {writer:.100}; upgrade treering to read it"
    )


def decode(data: bytes, name: str) -> Manifest:
    """Parses the file. Raises `CorruptError`, and `UnsupportedError` for what a later version wrote.

    A sealed manifest that cannot be parsed is of a later version, too, whatever it says: it is as it was written.
    """
    check(data, name)
    check_envelope(data, name)
    try:
        top = json.loads(data, object_pairs_hook=unique, parse_constant=_refuse, parse_float=_finite)
        manifest = msgspec.convert(top, Manifest)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise _unsupported(name, f"what is not understood ({error})", None) from None
    _check_files(manifest.files, name)
    return manifest


def summarize(data: bytes, name: str) -> Summary:
    """Checks the bytes and parses a few fields. Raises `CorruptError` and `UnsupportedError`."""
    check(data, name)
    check_envelope(data, name)
    try:
        summary = msgspec.json.decode(data, type=Summary)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _unsupported(name, f"what is not understood ({error})", None) from None
    _check_files(summary.files, name)
    return summary


def _check_files(files: list[File], name: str) -> None:
    for file in files:
        if "/" in file.name or "\\" in file.name or file.name in ("", ".", "..") or not _NAME.fullmatch(file.name):
            raise UnsafeError(f"{name}: {file.name!r:.100} is not the name of a file beside the manifest")
    if len({file.name for file in files}) != len(files):
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
