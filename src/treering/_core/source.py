"""What a tree is read from: an open checkpoint, a view of one, or a live tree."""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .boxes import Box
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
        place = self.file if self.block is None else f"{self.file}, block {self.block}"
        return f"{place}: {self.what}" + (f" (leaves: {few(self.leaves)})" if self.leaves else "")


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
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def metadata(self) -> Any: ...
    @property
    def nbytes(self) -> int: ...

    @property
    def created(self) -> datetime.datetime | None:
        """When the checkpoint was committed, in UTC, where that is known."""
        ...

    @property
    def identity(self) -> str:
        """What changes when the checkpoint is replaced by another, where that is known."""
        ...

    @property
    def positional(self) -> bool:
        """Whether leaves have no names, but only numbers: they are those of a template, in order."""
        ...

    @property
    def numbers_are_arrays(self) -> bool:
        """Whether Python's numbers were saved as arrays without axes, so that a template's `float` takes such a one."""
        ...

    @property
    def ambiguous_dtypes(self) -> frozenset[str]:
        """Paths of arrays of `uint8` whose dtype may be any of that size: only a template knows."""
        ...

    def check_present(self) -> None:
        """Raises `CorruptError` unless every file is there in its full size, as far as that can be told at a glance."""
        ...

    def sharding(self, entry: ArrayEntry) -> dict[str, Any] | None:
        """How an array was spread when it was saved, where that is known."""
        ...

    def can_mmap(self, requested: bool | None) -> bool:
        """Whether arrays come as views of the mapped files, which take no memory."""
        ...

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, mmap: bool | None = None
    ) -> "list[np.ndarray]":
        """The boxes of the arrays, each in memory that is the caller's to change."""
        ...

    def problems(self) -> Iterator[Problem]:
        """Reads every byte and yields all damage."""
        ...


ABOUT = ("step", "metrics", "metadata")  # what is recorded beside a tree


class Written(NamedTuple):
    """What writing came to: bytes on the disk, and seconds for the parts of it."""

    nbytes: int
    write_seconds: float
    sync_seconds: float = 0.0
    commit_seconds: float = 0.0
