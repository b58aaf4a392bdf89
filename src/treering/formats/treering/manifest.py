"""The manifest of format version 1: ``treering.json``. `docs/format.md` specifies it."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import xxhash

from ..._core.boxes import Box
from ..._core.entries import ArrayEntry, StatesEntry, ValueEntry
from ..._core.json_floats import as_floats
from ..._core.skeleton import Node
from ..._core.values import EXACT
from ..._threads.decoding import learn
from ...errors import CorruptError, TreeringError, UnsupportedError
from .._shared import strict_json
from . import validity

FORMAT = "treering"
VERSION = 1
_Natural = Annotated[int, msgspec.Meta(ge=0, le=EXACT)]
BLOCK = 1 << 20  # bytes of an array file's buffer per checksum
_TAIL = len(',"xxh3":"0123456789abcdef"}\n')


STATES = "iterator-states"  # the feature of an array that is the states of an iterator


class Later(msgspec.Struct, frozen=True, omit_defaults=True):
    """The place of an array that some release could not read: the features that this takes.

    The rest says of the feature `STATES` how many bytes the state of each process has, and where the array is. Of any
    other feature it says nothing that is known here.
    """

    requires: tuple[str, ...]
    lengths: Any = None
    where: Any = None

    def __hash__(self) -> int:  # the rest may be lists
        return hash(self.requires)


class ArrayRow(
    ArrayEntry, array_like=True, tag_field="leaf", tag="array", frozen=True, gc=False, forbid_unknown_fields=True
):
    """An array leaf and where its pieces are.

    `where` is the number of the one file that holds it whole; or a layout and a turn, by which the holders
    of replicated pieces rotate; or the path of an earlier leaf that is the same array; or the features it requires.
    """

    where: int | tuple[int, int] | str | Later = -1

    @property
    def unknown(self) -> tuple[str, ...]:
        """The features that the array requires and this release does not have."""
        return self.where.requires if isinstance(self.where, Later) and self.where.requires != (STATES,) else ()

    def of_states(self) -> "tuple[tuple[int, ...], ArrayRow] | None":
        """Returns the lengths of the states of an iterator and the array of their bytes; None for other arrays.

        Raises what is malformed for a row that is not as the format has it.
        """
        if not isinstance(self.where, Later) or self.unknown:
            return None
        lengths = msgspec.convert(self.where.lengths, tuple[_Natural, ...])
        where = msgspec.convert(self.where.where, int | tuple[int, int])
        if not lengths or (self.type, self.dtype, self.shape) != ("numpy", "uint8", (sum(lengths),)):
            raise ValueError(f"{self.path!r:.100} has states of {list(lengths)!r:.100} bytes, which it cannot have")
        return lengths, ArrayRow(self.path, self.type, self.dtype, self.shape, self.impl, where)


def states_row(entry: StatesEntry, where: int | tuple[int, int]) -> ArrayRow:
    """Returns the row of the states of an iterator, whose bytes are an array."""
    return ArrayRow(entry.path, "numpy", entry.dtype, entry.shape, "", Later((STATES,), entry.value, where))


class Layout(msgspec.Struct, frozen=True, omit_defaults=True):
    """The cuts along each axis of arrays of one shape and sharding, and the number of the holders of the cells."""

    cuts: tuple[tuple[int, ...], ...]
    holders: int
    sharding: dict[str, Any] | None = None


class Placement(msgspec.Struct, frozen=True):
    """Where the arrays were. `leaves` are runs of leaves in tree order: how many, and the number of their place.

    The number is -1 for leaves without a place.
    """

    places: list[dict[str, Any]]
    leaves: list[tuple[int, int]]

    def by_leaf(self) -> list[dict[str, Any] | None]:
        """Returns the place of every leaf."""
        places = [*self.places, None]
        return [places[number] for count, number in self.leaves for _ in range(count)]


class File(msgspec.Struct, frozen=True, omit_defaults=True):
    """An array file: its size, and the size and checksum of everything before the tensors.

    With `requires` only a later release can read it, and of the rest only name and size are known.
    """

    name: str
    size: _Natural
    header: int = -1
    xxh3: str = ""
    requires: list[str] = []


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Everything about a checkpoint but the arrays themselves.

    `metadata_floats` are the places in `metadata` where floats are that JSON cannot write; `decode` puts them there.
    `holders[h][i]` lists the files that may hold cell i of a layout with these holders.
    """

    format: str
    version: int
    requires: list[str] = []
    created: str
    software: dict[str, str]
    step: int | None = None
    metrics: dict[str, float | str] = {}
    metadata: Any = None
    metadata_floats: list[str] = []
    files: list[File]
    layouts: list[Layout] = []
    holders: list[tuple[tuple[int, ...], ...]] = []
    placement: Placement | None = None
    static: Mapping[str, Mapping[str, Any]] = {}
    tree: list[Node | int]
    leaves: list[ArrayRow | ValueEntry]


class _ValueRow(ValueEntry, tag="value", frozen=True, gc=False, forbid_unknown_fields=True):
    """A `ValueEntry` that leaves nothing out; an `ArrayRow` cannot, for no place is what stands for the last one."""

    value: Any  # pyright: ignore[reportGeneralTypeIssues]


_LARGE = {"tree": list[Node | int], "leaves": list[ArrayRow | _ValueRow]}  # fields


def piece_key(path: str, box: Box | None) -> str:
    """The name of a piece in its array file: the leaf's path, with the piece's first indices unless it is whole."""
    if box is None and path != "__metadata__":
        return path
    return path + "~@" + ",".join(str(start) for start, _ in box or ())


class _Envelope(msgspec.Struct, frozen=True):
    """The fields that no version changes in a sealed file, and the software that wrote it, each of any type."""

    format: Any = msgspec.UNSET
    version: Any = msgspec.UNSET
    requires: Any = msgspec.UNSET
    software: Any = None


class Summary(msgspec.Struct, frozen=True):
    """The parts of a manifest that managing a run needs; read without parsing the rest."""

    created: str
    files: list[File]
    step: int | None = None
    metrics: dict[str, float | str] = {}

    def created_seconds(self) -> float:
        """The time of the commit, in seconds since the epoch."""
        return as_utc(self.created).timestamp()


learn(Manifest, Summary, _Envelope, *_LARGE.values())


def as_utc(created: str) -> datetime.datetime:
    """The time that a valid manifest gives, in UTC."""
    return datetime.datetime.fromisoformat(created).astimezone(datetime.UTC)


def xxh3(data: Any) -> str:
    """A checksum as it is written everywhere: 16 hexadecimal digits of XXH3-64."""
    return xxhash.xxh3_64_hexdigest(data)


def seal(content: msgspec.Struct) -> bytes:
    """The bytes of a file with this content, its own checksum at the end."""
    body = memoryview(msgspec.json.encode(content))[:-1]  # no copies: of a very large job it has tens of megabytes
    return b"".join((body, b',"xxh3":"', xxh3(body).encode(), b'"}\n'))


def check(data: bytes, name: str) -> None:
    """Raises `CorruptError` unless the bytes are those that were written."""
    body, tail = memoryview(data)[:-_TAIL], data[-_TAIL:]
    if len(data) < _TAIL or not tail.startswith(b',"xxh3":"') or not tail.endswith(b'"}\n'):
        raise CorruptError(f"{name}: expected a manifest that ends in its checksum, found it cut short or changed")
    if tail[9:25] != xxh3(body).encode():
        raise CorruptError(f"{name}: the manifest's checksum does not fit its bytes; it is damaged")


def check_envelope(data: bytes, name: str, format: str = FORMAT, *, default: Any = None) -> None:
    """Raises `UnsupportedError` unless a sealed file is of a format and version that this release reads.

    Called after `check`, and before anything else in the file is read: what a later release wrote is not damage,
    whatever it looks like. `default` is the version of files that do not give theirs.
    """
    try:
        found = msgspec.json.decode(data, type=_Envelope)
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
    """The error for what cannot be read without features that this release does not have."""
    listed = ", ".join(feature if isinstance(feature, str) else repr(feature) for feature in features[:5])
    return _unsupported(name, f"that it requires {listed:.200}", software)


def check_known(manifest: Manifest, name: str) -> None:
    """Raises `UnsupportedError` when a part of a checkpoint can be read by a later release only."""
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
    """Parses the file. Raises `CorruptError`, and `UnsupportedError` for what a later version wrote.

    A sealed manifest that breaks the rules of this version is not damaged either: it is as it was written.
    """
    check(data, name)
    check_envelope(data, name)
    top: Any = None
    try:
        top = strict_json.parse_typed(data, _LARGE)
        large = {key: top[key] for key in _LARGE if key in top}
        if _ValueRow in set(map(type, large.get("leaves", ()))):
            large["leaves"] = [row.at(row.path) if isinstance(row, _ValueRow) else row for row in large["leaves"]]
        manifest = msgspec.convert({**top, **{key: [] for key in large}}, Manifest)
        manifest = msgspec.structs.replace(manifest, **large)
        validity.check(manifest, top)
        metadata = as_floats(manifest.metadata, manifest.metadata_floats)
        manifest = msgspec.structs.replace(manifest, metadata=metadata)
    except (*strict_json.MALFORMED, OverflowError, TreeringError) as error:
        raise invalid(f"{name}: {error}", top.get("software") if isinstance(top, dict) else None) from None
    return manifest


def summarize(data: bytes, name: str) -> Summary:
    """Checks the bytes and parses a few fields. Raises `CorruptError` and `UnsupportedError`."""
    check(data, name)
    check_envelope(data, name)
    try:
        summary = msgspec.json.decode(data, type=Summary)
        validity.check_summary(summary)
    except (*strict_json.MALFORMED, OverflowError) as error:
        raise invalid(f"{name}: {error}") from None
    return summary


def invalid(problem: str, software: Any = None) -> UnsupportedError:
    """The error for a file whose checksum is right and that breaks a rule of this version."""
    return UnsupportedError(
        f"{problem}; it is undamaged, but not as format version {VERSION} has it{': ' if software else ''}"
        f"{_writer(software) if software else ''}; upgrade treering to read it, or ask those who made what wrote it"
    )


def file_names(data: bytes) -> list[str]:
    """The names of the array files."""
    return [file.name for file in summarize(data, "manifest").files]
