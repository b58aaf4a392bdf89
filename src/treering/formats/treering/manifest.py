"""Reads and writes the manifest of format version 1, ``treering.json``. `docs/format.md` specifies it."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import xxhash

from ..._core.boxes import Box
from ..._core.entries import ValueEntry
from ..._core.skeleton import Node
from ..._core.values import text_to_floats
from ..._threads.preload_decoders import preload_decoders
from ...errors import CorruptError, TreeringError, UnsupportedError
from .._shared import strict_json
from . import validity
from .manifest_fields import ArrayRow, Manifest, Summary

FORMAT = "treering"
VERSION = 1
BLOCK = 1 << 20  # bytes of an array file's buffer per checksum
_SEAL_BYTES = len(',"xxh3":"0123456789abcdef"}\n')


class _ValueRow(ValueEntry, tag="value", frozen=True, gc=False, forbid_unknown_fields=True):
    """A `ValueEntry` with all fields written; an omitted field is an error.

    An `ArrayRow` needs no such class: its last field is its place, whose default no array can have.
    """

    value: Any  # pyright: ignore[reportGeneralTypeIssues]


_LARGE_FIELDS = {"tree": list[Node | int], "leaves": list[ArrayRow | _ValueRow]}  # the large fields, and their types


def piece_key(path: str, box: Box | None) -> str:
    """Returns the name of a piece in its array file: the leaf's path, and the piece's first indices.

    A piece that is the complete array (`box` is None) has only the path.
    """
    if box is None and path != "__metadata__":  # safetensors reserves this name in its header.
        return path
    return path + "~@" + ",".join(str(start) for start, _ in box or ())


class _Sealed(msgspec.Struct, frozen=True):
    """The fields of a sealed file that no version changes, and the software that wrote it, each of any type."""

    format: Any = msgspec.UNSET
    version: Any = msgspec.UNSET
    requires: Any = msgspec.UNSET
    software: Any = None


preload_decoders(_Sealed, *_LARGE_FIELDS.values())


xxh3: Callable[[Any], str] = xxhash.xxh3_64_hexdigest  # the checksums of the format: 16 hexadecimal digits of XXH3-64


def seal(content: msgspec.Struct) -> bytes:
    """Returns the bytes of a file with this content, with its own checksum at the end."""
    body = memoryview(msgspec.json.encode(content))[:-1]  # No copies: a very large job has tens of megabytes here.
    return b"".join((body, b',"xxh3":"', xxh3(body).encode(), b'"}\n'))


def check(data: bytes, name: str) -> None:
    """Raises `CorruptError` unless the bytes end in their checksum, so that they are the bytes that were written."""
    body, tail = memoryview(data)[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if len(data) < _SEAL_BYTES or not tail.startswith(b',"xxh3":"') or not tail.endswith(b'"}\n'):
        raise CorruptError(f"{name}: expected a manifest that ends in its checksum, found it cut short or changed")
    if tail[9:25] != xxh3(body).encode():
        raise CorruptError(f"{name}: the manifest's checksum does not fit its bytes; it is damaged")


def check_envelope(data: bytes, name: str, format: str = FORMAT, *, default: Any = None) -> None:
    """Raises `UnsupportedError` unless a sealed file has a format and version that this release reads.

    Callers use it after `check`, and before they read anything else in the file, so that a file of a later release is
    never reported as damage. `default` is the version of a file that does not give its own.
    """
    try:
        found = msgspec.json.decode(data, type=_Sealed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _unsupported(name, f"what is not understood ({error})", None) from None
    version = default if found.version is msgspec.UNSET else found.version
    if found.format != format and not (found.format is msgspec.UNSET and default is not None):
        raise _unsupported(name, f"the format {_shown(found.format)}", found.software)
    if type(version) is not int or version != VERSION:
        raise _unsupported(name, f"version {_shown(version)}", found.software)
    if found.requires is not msgspec.UNSET and found.requires != []:
        features = found.requires if isinstance(found.requires, list) else [found.requires]
        raise requiring(name, features, found.software)


def requiring(name: str, features: Sequence[Any], software: Any = None) -> UnsupportedError:
    """Returns the error for a file or leaf that requires features which this release does not have."""
    listed = ", ".join(feature if isinstance(feature, str) else repr(feature) for feature in features[:5])
    return _unsupported(name, f"that it requires {listed:.200}", software)


def check_known(manifest: Manifest, name: str) -> None:
    """Raises `UnsupportedError` if only a later release can read some part of a checkpoint."""
    for file in manifest.files:
        if file.requires:
            raise requiring(f"{name}: the file {file.name!r}", file.requires, manifest.software)
    for row in manifest.leaves:
        if isinstance(row, ArrayRow) and row.unknown:
            raise requiring(f"{name}: the leaf {row.path!r}", row.unknown, manifest.software)


def _unsupported(name: str, found: str, software: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{name}: expected format version {VERSION} without further features, which is all that this release reads, "
        f"found {found}; it is undamaged: {_writer(software)}; upgrade treering to read it"
    )


def _shown(found: Any) -> str:
    return "None" if found is msgspec.UNSET else f"{found!r:.100}"


def _writer(software: Any) -> str:
    release = software.get("treering") if isinstance(software, dict) else None
    printable = type(release) is str and release.isprintable()
    return f"treering {release:.100} wrote it" if printable else "a later one wrote it"


def decode(data: bytes, name: str) -> Manifest:
    """Parses a manifest. Raises `CorruptError` for damage, and `UnsupportedError` if a later version wrote it.

    A sealed manifest that breaks the rules of this version also raises `UnsupportedError`: its checksum is right, so
    its bytes are the bytes that were written.
    """
    check(data, name)
    check_envelope(data, name)
    top: Any = None
    try:
        top = strict_json.parse_typed(data, _LARGE_FIELDS)
        large = {key: top[key] for key in _LARGE_FIELDS if key in top}
        if _ValueRow in set(map(type, large.get("leaves", ()))):
            large["leaves"] = [row.at(row.path) if isinstance(row, _ValueRow) else row for row in large["leaves"]]
        manifest = msgspec.convert({**top, **{key: [] for key in large}}, Manifest)
        manifest = msgspec.structs.replace(manifest, **large)
        validity.check(manifest, top)
        if manifest.metadata_floats:
            metadata = text_to_floats(manifest.metadata, manifest.metadata_floats)
            manifest = msgspec.structs.replace(manifest, metadata=metadata)
    except (*strict_json.MALFORMED, OverflowError, TreeringError) as error:
        raise invalid(f"{name}: {error}", top.get("software") if isinstance(top, dict) else None) from None
    return manifest


def summarize(data: bytes, name: str) -> Summary:
    """Checks the bytes of a manifest and parses a few fields. Raises `CorruptError` and `UnsupportedError`."""
    check(data, name)
    check_envelope(data, name)
    try:
        summary = msgspec.json.decode(data, type=Summary)
        validity.check_summary(summary)
    except (*strict_json.MALFORMED, OverflowError) as error:
        raise invalid(f"{name}: {error}") from None
    return summary


def invalid(problem: str, software: Any = None) -> UnsupportedError:
    """Returns the error for a file that breaks a rule of this version although its checksum is right."""
    return UnsupportedError(
        f"{problem}; it is undamaged, but not as format version {VERSION} has it{': ' if software else ''}"
        f"{_writer(software) if software else ''}; upgrade treering to read it, or ask the maker of the program that "
        "wrote it"
    )


def file_names(data: bytes) -> list[str]:
    """Returns the names of the array files that a manifest lists."""
    return [file.name for file in summarize(data, "manifest").files]
