"""Defines the protocol `Source`: an open checkpoint, a view of one, or a live tree, from which leaves are read.

The functions below ask for what only some sources have, and return a default for the rest.
"""

import contextvars
import datetime
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from .._printable import safe, safe_lines
from ..errors import UnsupportedError
from .boxes import Box, full_box
from .entries import ArrayEntry, Entry
from .leaf_paths import join_names
from .skeleton import Node, Skeleton

if TYPE_CHECKING:
    import numpy as np
Boxes = Mapping[str, Sequence[tuple[str, str]]]  # by path, from the outside in: kind of each, and its child's name
# The names of the classes of `treering.orbax.nodes`. They have dots, so no class of a program has such a name.
COMPOSITE = "treering.orbax.Composite"  # of a tree whose children are items, as Orbax has them
COMPOSITE_V1 = "treering.orbax.v1.Composite"  # of the same for version 1 of Orbax, in trees to write
HANDLER_FILES = "treering.orbax.HandlerFiles"  # of an item whose leaves are the files of a handler, as bytes
JSON_ITEM = "treering.orbax.Json"  # of an item that is a dict or a list of JSON
INFO_FIELDS = ("step", "metrics", "metadata")  # attributes of a source that are recorded together with a tree


class Problem(NamedTuple):
    """Damage of a file: the leaves it affects, and the number of the 1 MiB block, or None for the entire file."""

    file: str
    leaves: tuple[str, ...]
    block: int | None
    what: str

    def __str__(self) -> str:
        place = safe(self.file) if self.block is None else f"{safe(self.file)}, block {self.block}"
        what = safe_lines(self.what.removeprefix(f"{self.file}: "))  # Messages of errors begin with the path.
        return f"{place}: {what}" + (f" (leaves: {join_names(self.leaves)})" if self.leaves else "")


class Share(NamedTuple):
    """One of `parts` equal shares of some bytes. `number` counts from 1."""

    number: int
    parts: int

    def of(self, nbytes: int) -> tuple[int, int]:
        """Returns the first byte of the share, and the byte after its last."""
        return nbytes * (self.number - 1) // self.parts, nbytes * self.number // self.parts


EVERYTHING = Share(1, 1)


class Source(Protocol):
    """An open checkpoint of some format: its entries by path, and their contents on request.

    `skeleton` is None if the format records no tree.
    """

    @property
    def format(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def entries(self) -> Mapping[str, Entry]: ...
    @property
    def skeleton(self) -> Skeleton | None: ...
    @property
    def step(self) -> int | None: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...  # some formats read them only when they are first used
    @property
    def metadata(self) -> Any: ...
    @property
    def nbytes(self) -> int: ...

    @property
    def created(self) -> datetime.datetime | None:
        """The time of the commit, in UTC, or None if it is not known."""
        ...

    @property
    def identity(self) -> str:
        """A text that changes when another checkpoint replaces this one, as far as the format can tell.

        "" if that is not known, or if processes should not divide the reading of it.
        """
        ...

    @property
    def positional(self) -> bool:
        """True if leaves have only numbers as names. Then they are the leaves of a template, in its order."""
        ...

    @property
    def numbers_are_arrays(self) -> bool:
        """True if the format saves Python numbers as arrays without axes."""
        ...

    @property
    def ambiguous_dtypes(self) -> frozenset[str]:
        """The paths of `uint8` arrays that may have had any dtype of that size. Only a template says which."""
        ...

    def check_present(self) -> None:
        """Raises `CorruptError` if a file is missing or has the wrong size, as far as a quick check shows."""
        ...

    def sharding(self, entry: ArrayEntry) -> Mapping[str, Any] | None:
        """Returns the place of an array when it was saved, as JSON, or None if that is not recorded.

        `{"mesh": {axis: size}, "spec": [...]}` is a mesh and a `PartitionSpec`. The native format records more; see
        "Placement" in `docs/format.md`.
        """
        ...

    def can_mmap(self, requested: bool | None) -> bool:
        """Returns True if `read` returns views of mapped files, which take no memory."""
        ...

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, mmap: bool | None = None
    ) -> "list[np.ndarray]":
        """Reads boxes of arrays, each into memory that the caller may change."""
        ...

    def problems(self, share: Share = EVERYTHING) -> Iterator[Problem]:
        """Reads every byte, or a share of them, and yields all damage."""
        ...


def pieces(source: Source, entry: ArrayEntry, box: Box) -> list[tuple[int, Box]]:
    """Returns the pieces on disk that have a part of an array: the number of the file and the box of each piece.

    A piece is one run of bytes in C order. For a source without a method `pieces` the array is one piece.
    """
    own = getattr(source, "pieces", None)
    return own(entry, box) if own else [(0, full_box(entry.shape))]


class Wanted:
    """The paths of the only leaves that a caller will read, so that a format may open fewer files.

    is_used: True once a format has left out files. The source then lacks leaves, and no error may say what it has.
    """

    def __init__(self, find: Callable[[], Collection[str]]) -> None:
        self.find, self.is_used = find, False


# A variable, because formats of others implement `open` without such an argument.
wanted_leaves: contextvars.ContextVar[Wanted | None] = contextvars.ContextVar("wanted_leaves", default=None)


def records_kinds(source: Source) -> bool:
    """Returns True if a source records the type, dtype and weak type that every leaf had in its job.

    For a source without an attribute `records_kinds`, only a template says the kind of a leaf.
    """
    return getattr(source, "records_kinds", False)


def arrays_of(source: Source) -> Iterator[ArrayEntry]:
    """Yields the entries of the arrays of a source."""
    return (entry for entry in source.entries.values() if isinstance(entry, ArrayEntry))


def complete_arrays(source: Source) -> Iterator[tuple[ArrayEntry, Box]]:
    """Yields the entries of the arrays of a source, each with the box of all of it."""
    return ((entry, full_box(entry.shape)) for entry in arrays_of(source))


def expands(source: Source) -> bool:
    """Returns True if the arrays of a source may take more bytes than are stored; see `expansion`.

    This is assumed for a source without an attribute `expands`.
    """
    return getattr(source, "expands", True)


def has_checksums(source: Source) -> bool:
    """Returns True if stored checksums cover every byte of the arrays, so that `problems` notices each change.

    A source without an attribute `has_checksums` has none.
    """
    return getattr(source, "has_checksums", False)


def static_values(source: Source) -> Mapping[str, Mapping[str, Any]]:
    """Returns the static values that a source records, by the path of their container and by name."""
    return getattr(source, "static", {})


def flax_boxes(source: Source) -> Boxes:
    """Returns the boxes of Flax around the leaves and containers of a source, such as NNX Variables.

    Paths do not show them. A source without an attribute `flax_boxes` records none.
    """
    return getattr(source, "flax_boxes", {})


def model_config(source: Source) -> Mapping[str, Any]:
    """Returns what the model's configuration next to a checkpoint says about quantized weights.

    A source without a method `model_config` has no such file.
    """
    own = getattr(source, "model_config", None)
    return own() if own else {}


def left_out(source: Source) -> Sequence[str]:
    """Returns descriptions of data besides the leaves that cannot be read here, such as a data iterator.

    A source without an attribute `left_out` has no such data.
    """
    return getattr(source, "left_out", ())


def origins(source: Source, paths: Sequence[str]) -> Sequence[str]:
    """Returns for each leaf the path of the first leaf that was the same array object when it was saved.

    For a source without a method `origin`, every leaf was an object of its own.
    """
    origin = getattr(source, "origin", None)
    return [origin(path) for path in paths] if origin else paths


def item_names(source: Source) -> tuple[str, ...] | None:
    """Returns the names of the items of a checkpoint, the children of its root; None if it is one tree.

    A source without an attribute `item_names` has items if its root is of the class `COMPOSITE`.
    """
    if (names := getattr(source, "item_names", ...)) is not ...:
        return names
    root = source.skeleton[0] if source.skeleton else None
    return tuple(map(str, root.names())) if isinstance(root, Node) and root.name == COMPOSITE else None


class Written(NamedTuple):
    """The result of a write: the bytes stored, the seconds of each stage, and the bytes that were not written again.

    changed: of a version of published weights, the share of the elements that changed; None if it is complete.
    """

    nbytes: int
    write_seconds: float
    sync_seconds: float = 0.0
    commit_seconds: float = 0.0
    shared_bytes: int = 0
    changed: float | None = None


class Subtree:
    """Some leaves of a source under names of their own, and their tree. Everything else is that of the source.

    The entries keep the paths by which the source reads them, so a part adds no work when they are read.
    """

    # The reader of Orbax may have a level and items. A part is chosen below them, so it has neither.
    level, item_names = "", None

    def __init__(self, full: Source, entries: Mapping[str, Entry], skeleton: Skeleton | None, below: str):
        self.full, self.entries, self.skeleton, self.below = full, entries, skeleton, below

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["full"], name)


def subtree_of(source: Source, entries: Mapping[str, Entry], skeleton: Skeleton | None, below: str = "") -> Source:
    """Returns the part of a source that has these entries. Their names are relative to the path `below`."""
    return cast(
        "Source", Subtree(full_source(source), entries, skeleton, "/".join(filter(None, [subtree_path(source), below])))
    )


def full_source(source: Source) -> Source:
    """Returns the source that a part belongs to, or the source itself if it is not a part."""
    return source.full if isinstance(source, Subtree) else source


def is_left_out(source: Source) -> bool:
    """Returns True for a source, or a part of one, with data of unknown kinds only."""
    full = full_source(source)
    return any(left_out(full)) and len(full.skeleton or ()) <= 1 and not full.entries


def check_not_left_out(source: Source) -> None:
    """Raises `UnsupportedError` for a source with data of unknown kinds only."""
    if is_left_out(source):
        found = ", ".join(left_out(source))
        handler = ", or by its handler with treering.orbax" if source.format == "orbax" else ""
        raise UnsupportedError(
            f"{source.path}: expected leaves that Treering can read, found only {found}; restore it with the library "
            f"that wrote it{handler}"
        )


def subtree_path(source: Source) -> str:
    """Returns the path to which the names of a part are relative, or "" for a source that is not a part."""
    return source.below if isinstance(source, Subtree) else ""


def source_name(source: Source) -> str:
    """Returns the path of a source for messages. For a part it also says which part."""
    below = subtree_path(source)
    return source.path + (f", at {below}" if below else "")
