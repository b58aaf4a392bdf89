"""The source that a tree is read from: an open checkpoint, a view of one, or a live tree."""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .._printable import safe, safe_lines
from .boxes import Box, whole
from .entries import ArrayEntry, Entry
from .leaf_paths import few
from .skeleton import Skeleton

if TYPE_CHECKING:
    import numpy as np


class Problem(NamedTuple):
    """Damage: the file, the leaves it touches, and the number of the 1 MiB block (None: the file as a whole)."""

    file: str
    leaves: tuple[str, ...]
    block: int | None
    what: str

    def __str__(self) -> str:
        place = safe(self.file) if self.block is None else f"{safe(self.file)}, block {self.block}"
        return f"{place}: {safe_lines(self.what)}" + (f" (leaves: {few(self.leaves)})" if self.leaves else "")


class Share(NamedTuple):
    """The `number`-th of so many equal shares of some bytes, from 1 on."""

    number: int
    parts: int

    def of(self, nbytes: int) -> tuple[int, int]:
        """Where it begins and ends."""
        return nbytes * (self.number - 1) // self.parts, nbytes * self.number // self.parts


WHOLE = Share(1, 1)


class Source(Protocol):
    """An open checkpoint of some format: a catalogue of entries by path, and their contents on request.

    `skeleton` is None where the format records no tree.
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
    def metrics(self) -> Mapping[str, float]: ...  # which may be looked for when they are asked for first
    @property
    def metadata(self) -> Any: ...
    @property
    def nbytes(self) -> int: ...

    @property
    def created(self) -> datetime.datetime | None:
        """The time of the commit, in UTC; None where it is not known."""
        ...

    @property
    def identity(self) -> str:
        """A text that changes when the checkpoint is replaced by another, as far as the format tells.

        "" where that is not known, or where processes had better not divide what they read of it.
        """
        ...

    @property
    def positional(self) -> bool:
        """Whether leaves have no names, only numbers: they are those of a template, in order."""
        ...

    @property
    def numbers_are_arrays(self) -> bool:
        """Whether Python's numbers were saved as arrays without axes, so that a template's `float` takes one."""
        ...

    @property
    def ambiguous_dtypes(self) -> frozenset[str]:
        """The paths of `uint8` arrays whose real dtype may be any of that size: only a template says which."""
        ...

    def check_present(self) -> None:
        """Raises `CorruptError` unless every file is there in its full size, as far as a quick look shows."""
        ...

    def sharding(self, entry: ArrayEntry) -> Mapping[str, Any] | None:
        """Returns where an array was when it was saved, as JSON, or None if that is not recorded.

        `{"mesh": {axis: size}, "spec": [...]}` is a mesh and a `PartitionSpec`. The native format records more; see
        "Placement" in `docs/format.md`.
        """
        ...

    def can_mmap(self, requested: bool | None) -> bool:
        """Whether arrays come as views of the mapped files, which take no memory."""
        ...

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, mmap: bool | None = None
    ) -> "list[np.ndarray]":
        """The boxes of the arrays, each in memory that is the caller's to change."""
        ...

    def problems(self, share: Share = WHOLE) -> Iterator[Problem]:
        """Reads every byte, or a share of them, and yields all damage."""
        ...


def pieces(source: Source, entry: ArrayEntry, box: Box) -> list[tuple[int, Box]]:
    """The pieces in which a part of an array lies on the disk: the number of the file, and the box of each.

    Each is one run of bytes in C order. A source has no need to know: without a method `pieces` it is one piece.
    """
    own = getattr(source, "pieces", None)
    return own(entry, box) if own else [(0, whole(entry.shape))]


def records_kinds(source: Source) -> bool:
    """Returns True if a source records the type, dtype and weak type that every leaf had in its job.

    A source has no need to: without an attribute `records_kinds` only a template says what a leaf becomes.
    """
    return getattr(source, "records_kinds", False)


def arrays_of(source: Source) -> Iterator[ArrayEntry]:
    """The arrays of a source."""
    return (entry for entry in source.entries.values() if isinstance(entry, ArrayEntry))


def expands(source: Source) -> bool:
    """Returns whether the arrays of a source may be more bytes than are stored; see `expansion`.

    A source has no need to know: without an attribute `expands` they may be.
    """
    return getattr(source, "expands", True)


def static_values(source: Source) -> Mapping[str, Mapping[str, Any]]:
    """Returns the static values that a source records, by the path of their container and by name."""
    return getattr(source, "static", {})


def left_out(source: Source) -> Sequence[str]:
    """Returns descriptions of what a checkpoint has beside its leaves and cannot be read here, such as a data iterator.

    A source has no need to: without an attribute `left_out` it has nothing of the kind.
    """
    return getattr(source, "left_out", ())


def origins(source: Source, paths: Sequence[str]) -> Sequence[str]:
    """Returns for each leaf the path of the first leaf that was the same array object when it was saved.

    A source has no need to know: without a method `origin` every leaf is its own.
    """
    origin = getattr(source, "origin", None)
    return [origin(path) for path in paths] if origin else paths


ABOUT = ("step", "metrics", "metadata")  # what is recorded beside a tree


class Written(NamedTuple):
    """The result of writing: bytes on the disk, and the seconds of its parts."""

    nbytes: int
    write_seconds: float
    sync_seconds: float = 0.0
    commit_seconds: float = 0.0
