"""One module per format, behind the protocol of a reader.

A format knows files and what is in them. It never knows about templates, meshes or managers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .._catalogue import ArrayEntry, Entry
from .._sharding import Box
from .._tree import Skeleton

if TYPE_CHECKING:
    import numpy as np


class Problem(Protocol):
    """Damage: the file, the leaves it touches, and the number of the block (None: the file as a whole)."""

    @property
    def file(self) -> str: ...
    @property
    def leaves(self) -> tuple[str, ...]: ...
    @property
    def block(self) -> int | None: ...


class Reader(Protocol):
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

    def sharding(self, entry: ArrayEntry) -> dict[str, Any] | None:
        """How an array was spread when it was saved, where that is known."""
        ...

    def maps(self, wish: bool | None) -> bool:
        """Whether arrays come as views of the mapped files, which take no memory."""
        ...

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, map: bool | None = None
    ) -> "list[np.ndarray]":
        """The boxes of the arrays, each in memory that is the caller's to change."""
        ...

    def problems(self) -> Iterator[Problem]:
        """Reads every byte and yields all damage."""
        ...
