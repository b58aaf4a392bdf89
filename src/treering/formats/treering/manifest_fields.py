"""The fields of the manifest, as types. `manifest` reads and writes them; `validity` has their rules."""

import datetime
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from ..._core.entries import ArrayEntry, StatesEntry, ValueEntry
from ..._core.skeleton import Node
from ..._core.values import EXACT
from ..._threads.decoding import learn

_Natural = Annotated[int, msgspec.Meta(ge=0, le=EXACT)]
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


def as_utc(created: str) -> datetime.datetime:
    """The time that a valid manifest gives, in UTC."""
    return datetime.datetime.fromisoformat(created).astimezone(datetime.UTC)


class Summary(msgspec.Struct, frozen=True):
    """The parts of a manifest that managing a run needs; read without parsing the rest."""

    created: str
    files: list[File]
    step: int | None = None
    metrics: dict[str, float | str] = {}

    def created_seconds(self) -> float:
        """The time of the commit, in seconds since the epoch."""
        return as_utc(self.created).timestamp()


learn(Manifest, Summary)
