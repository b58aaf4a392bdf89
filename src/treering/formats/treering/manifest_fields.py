"""Defines the fields of the manifest as types. `manifest` reads and writes them; `validity` checks their rules."""

import datetime
import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from ..._core.entries import ArrayEntry, StatesEntry, ValueEntry
from ..._core.skeleton import Node, Skeleton, containers
from ..._core.source import Boxes
from ..._core.values import MAX_EXACT_INT
from ..._threads.preload_decoders import preload_decoders

_Natural = Annotated[int, msgspec.Meta(ge=0, le=MAX_EXACT_INT)]
_Checksum = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
STATES = "iterator-states"  # the feature of an array that is the states of an iterator
DELTA = "differences"  # the feature of an array that is stored as its difference to that of an earlier checkpoint
PARTS = "differences-in-parts"  # the same, each piece of the array by itself


class ExtendedPlace(msgspec.Struct, frozen=True, omit_defaults=True):
    """The place of an array that only releases with certain features can read.

    requires: the features.
    where: the place of the stored bytes.
    lengths: for the feature `STATES`, the bytes of the state of each process.
    nbytes, count, gap, base, xxh3: for the feature `DELTA`; see `Delta`.
    parts: for the feature `PARTS`, the `Delta` of each piece, or None for a piece that is stored as it is.

    For other features, this release does not know the meaning of these fields.
    """

    requires: tuple[str, ...]
    lengths: Any = None
    where: Any = None
    nbytes: Any = None
    count: Any = None
    gap: Any = None
    base: Any = None
    xxh3: Any = None
    parts: Any = None

    def __hash__(self) -> int:  # The other fields may be lists, which have no hash.
        return hash((self.requires, repr(self.xxh3), repr(self.where), repr(self.parts)))


class ArrayRow(
    ArrayEntry, array_like=True, tag_field="leaf", tag="array", frozen=True, gc=False, forbid_unknown_fields=True
):
    """An array leaf and the place of its pieces.

    `where` is one of four: the number of the file that holds the array in one piece; the number of a layout, and a turn
    by which the holders of replicated pieces rotate; the path of an earlier leaf that is the same array; or a place
    that requires features.
    """

    where: int | tuple[int, int] | str | ExtendedPlace = -1

    @property
    def unknown(self) -> tuple[str, ...]:
        """The features that the array requires and that this release does not have."""
        where = self.where
        if not isinstance(where, ExtendedPlace) or where.requires in ((STATES,), (DELTA,), (PARTS,)):
            return ()
        return where.requires

    def of_states(self) -> "tuple[tuple[int, ...], ArrayRow] | None":
        """Returns the lengths of an iterator's states in bytes, and the array of their bytes; None for other arrays.

        Raises `ValueError` or `msgspec.ValidationError` for a row that breaks the format.
        """
        if not isinstance(self.where, ExtendedPlace) or self.where.requires != (STATES,):
            return None
        lengths = msgspec.convert(self.where.lengths, tuple[_Natural, ...])
        where = msgspec.convert(self.where.where, int | tuple[int, int])
        if not lengths or (self.type, self.dtype, self.shape) != ("numpy", "uint8", (sum(lengths),)):
            raise ValueError(f"{self.path!r:.100} has states of {list(lengths)!r:.100} bytes, which it cannot have")
        return lengths, ArrayRow(self.path, self.type, self.dtype, self.shape, self.impl, where)

    def of_delta(self) -> "DeltaPlace | None":
        """Returns how an array is stored as a difference; None for other arrays. Raises the errors of `of_states`."""
        where = self.where
        if not isinstance(where, ExtendedPlace) or where.requires not in ((DELTA,), (PARTS,)):
            return None
        if where.requires == (PARTS,):
            parts = msgspec.convert(where.parts, tuple[Delta | None, ...])
            place = msgspec.convert(where.where, tuple[int, int])
            return DeltaPlace(ArrayRow(self.path, self.type, self.dtype, self.shape, self.impl, place), parts, True)
        delta = msgspec.convert([getattr(where, name) for name in Delta.__struct_fields__], Delta)
        place = msgspec.convert(where.where, int | tuple[int, int])
        return DeltaPlace(ArrayRow(self.path, "numpy", "uint8", (delta.nbytes,), "", place), (delta,), False)

    def stored(self) -> "ArrayRow":
        """Returns the row of the bytes that are stored for this array. Raises the errors of `of_states`."""
        if states := self.of_states():
            return states[1]
        delta = self.of_delta()
        return delta.stored if delta else self


class Delta(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The difference of an array, or of a piece of one, to the same elements of the leaf with its path in the base.

    nbytes: the bytes that are stored; `deltas` has their form.
    count: the elements that differ.
    gap: the bytes of a number that says how many elements are left out.
    base, xxh3: the checksums of the bytes of these elements in the base, and in this checkpoint.
    """

    nbytes: _Natural
    count: _Natural
    gap: Literal[1, 2, 4, 8]
    base: _Checksum
    xxh3: _Checksum


class DeltaPlace(NamedTuple):
    """Where an array is that is stored as its difference.

    stored: the row of the bytes of the difference. With `is_parted`, that of the array, whose pieces are stored.
    parts: one for each piece, or the only one.
    """

    stored: ArrayRow
    parts: tuple[Delta | None, ...]
    is_parted: bool


def delta_row(of: ArrayEntry, where: int | tuple[int, int], delta: Delta) -> ArrayRow:
    """Returns the row of an array that is stored as its difference to that of another checkpoint."""
    place = ExtendedPlace((DELTA,), where=where, **msgspec.structs.asdict(delta))
    return ArrayRow(of.path, of.type, of.dtype, of.shape, of.impl, place)


def parts_row(of: ArrayRow, parts: Sequence[Delta | None]) -> ArrayRow:
    """Returns the row of an array with several pieces, some of which are stored as differences."""
    place = ExtendedPlace((PARTS,), where=of.where, parts=parts)
    return ArrayRow(of.path, of.type, of.dtype, of.shape, of.impl, place)


def states_row(entry: StatesEntry, where: int | tuple[int, int]) -> ArrayRow:
    """Returns the row of an iterator whose states are stored as an array of bytes."""
    return ArrayRow(entry.path, "numpy", entry.dtype, entry.shape, "", ExtendedPlace((STATES,), entry.value, where))


class Layout(msgspec.Struct, frozen=True, omit_defaults=True):
    """The layout of arrays of one shape and sharding: the cuts along each axis, and an index into `holders`."""

    cuts: tuple[tuple[int, ...], ...]
    holders: int
    sharding: dict[str, Any] | None = None


class Placement(msgspec.Struct, frozen=True):
    """The devices on which the arrays were when they were saved.

    `leaves` are runs of leaves in tree order: the length of the run, and the number of its place in `places`. The
    number is -1 for leaves without a place.
    """

    places: list[dict[str, Any]]
    leaves: list[tuple[int, int]]

    def by_leaf(self) -> list[dict[str, Any] | None]:
        """Returns the place of every leaf, in tree order."""
        places = [*self.places, None]
        return [places[number] for count, number in self.leaves for _ in range(count)]


class BoxesOfNodes(msgspec.Struct, frozen=True):
    """The boxes of Flax around leaves and containers.

    kinds: what boxes there are around one node, from the outside in: the kind of each, and the name of its child.
    nodes: runs of nodes of the tree: the length of the run, and the number of its kind, or -1 for nodes without a box.
    """

    kinds: list[tuple[tuple[str, str], ...]]
    nodes: list[tuple[Annotated[int, msgspec.Meta(ge=1)], Annotated[int, msgspec.Meta(ge=-1)]]]

    @staticmethod
    def of(tree: Skeleton, boxes: Boxes) -> "BoxesOfNodes":
        """Returns what a manifest records of boxes that are given by path."""
        by_node = [tuple(boxes.get(path, ())) for _, path, _ in containers(tree)]
        kinds = list(dict.fromkeys(filter(None, by_node)))
        numbers = {kind: number for number, kind in enumerate(kinds)} | {(): -1}
        return BoxesOfNodes(kinds, [(len(list(run)), numbers[kind]) for kind, run in itertools.groupby(by_node)])

    def by_path(self, tree: Skeleton) -> Boxes:
        """Returns the boxes by path. Raises `ValueError`, `IndexError` or `OverflowError` if they do not fit."""
        kinds = [*self.kinds, ()]
        by_node = itertools.chain.from_iterable(itertools.repeat(kinds[number], count) for count, number in self.nodes)
        return {path: kind for (_, path, _), kind in zip(containers(tree), by_node, strict=True) if kind}


class File(msgspec.Struct, frozen=True, omit_defaults=True):
    """An array file: its name, its size, and the size and checksum of everything before the tensors.

    With `requires`, only a later release can read the file, and only its name and size have a known meaning.
    """

    name: str
    size: _Natural
    header: int = -1
    xxh3: str = ""
    requires: list[str] = []

    @property
    def content(self) -> tuple[int, int, str]:
        """The size and the checksum of the header, which has the checksums of all blocks: equal for equal files."""
        return self.size, self.header, self.xxh3


class Base(msgspec.Struct, frozen=True):
    """The checkpoint that a checkpoint with deltas was made from.

    name: its folder, next to that of the checkpoint.
    xxh3: the checksum of its manifest file, which no other checkpoint has.
    """

    name: str
    xxh3: _Checksum


class Published(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a version of published weights has sent.

    elements: those of all arrays.
    changed: those that differ from the base, and all of arrays and pieces that are stored as they are; None without a
        base.
    seconds: from the call to the commit.
    """

    elements: _Natural
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    changed: _Natural | None = None

    @property
    def share(self) -> float | None:
        """The share of the elements that changed; None without a base."""
        return None if self.changed is None else self.changed / max(self.elements, 1)

    @staticmethod
    def of(found: Any) -> "Published | None":
        """Returns the record of a manifest, or nothing if it is not as it should be."""
        try:
            return msgspec.convert(found, Published | None)
        except msgspec.ValidationError:
            return None


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Everything about a checkpoint except the arrays themselves.

    metadata_floats: the places in `metadata` of floats that JSON cannot write; `decode` puts the floats there.
    holders: `holders[h][i]` lists the files that may hold cell `i` of a layout with these holders.
    iterators, boxes, published: an `IteratorInfo` by path, `BoxesOfNodes`, and `Published`; anything else is ignored.
    """

    format: str
    version: int
    requires: list[str] = []
    created: str
    software: dict[str, str]
    step: int | None = None
    metrics: dict[str, float | str] = {}
    base: Base | None = None
    published: Any = None
    metadata: Any = None
    metadata_floats: list[str] = []
    files: list[File]
    layouts: list[Layout] = []
    holders: list[tuple[tuple[int, ...], ...]] = []
    placement: Placement | None = None
    static: Mapping[str, Mapping[str, Any]] = {}
    iterators: Any = {}
    boxes: Any = {}
    tree: list[Node | int]
    leaves: list[ArrayRow | ValueEntry]


def as_utc(created: str) -> datetime.datetime:
    """Returns the time that a valid manifest gives, in UTC."""
    return datetime.datetime.fromisoformat(created).astimezone(datetime.UTC)


class Summary(msgspec.Struct, frozen=True):
    """The fields of a manifest that managing a run needs. They are read without parsing the rest."""

    created: str
    files: list[File]
    step: int | None = None
    metrics: dict[str, float | str] = {}
    base: Base | None = None
    published: Any = None

    def created_seconds(self) -> float:
        """Returns the time of the commit, in seconds since the epoch."""
        return as_utc(self.created).timestamp()


preload_decoders(Manifest, Summary, BoxesOfNodes, Published)
