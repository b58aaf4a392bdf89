"""Describes how an array is spread over the processes of a job: its pieces, and the processes that hold each."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from .boxes import Box, Cells


class Holders(tuple[tuple[int, ...], ...]):
    """The processes that hold each piece of an array. Arrays of many shapes share one such object."""

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash  # Computed once, because there may be a hundred thousand pieces.

    @functools.cached_property
    def turns(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """An array with one column per piece: its holders, repeated from the first if other pieces have more holders.

        Each row therefore names one holder of every piece.
        """
        most = max(map(len, self))
        if most == min(map(len, self)):
            return np.ascontiguousarray(np.array(self, np.int32).T)
        return np.ascontiguousarray(np.array([[own[n % len(own)] for n in range(most)] for own in self], np.int32).T)


class Layout:
    """The spread of an array over processes: `holders[i]` are the processes that hold the piece `boxes[i]`.

    The boxes are the cells of a grid, in C order. Layouts are compared by identity, and shared by the arrays of one
    shape and sharding.
    """

    def __init__(self, boxes: Sequence[Box], holders: Sequence[Sequence[int]]):
        self.boxes, order = Cells.of(boxes)
        own = holders if isinstance(holders, Holders) else Holders(map(tuple, holders))
        self.holders = own if boxes is self.boxes else Holders(own[n] for n in order)

    @functools.cached_property
    def elements(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The number of elements of each box."""
        return self.boxes.sizes()

    def nbytes(self, itemsize: int) -> int:
        """Returns the size of the array in bytes, each piece counted once."""
        return math.prod(self.boxes.shape) * itemsize

    @functools.cached_property
    def largest(self) -> int:
        """The number of elements of the largest box."""
        return int(self.elements.max())

    @functools.cached_property
    def is_regular(self) -> bool:
        """True if all boxes have the same shape, so that each box can be divided into chunks of one shape."""
        return all(len(set(map(operator.sub, axis[1:], axis))) == 1 for axis in self.boxes.cuts)


@functools.lru_cache(maxsize=4096)
def held_by(boxes: Cells, holders: tuple[int, ...]) -> Layout:
    """Returns the layout of an array if each holder has all of its boxes."""
    return Layout(boxes, _all_held_by(holders, len(boxes)))


@functools.lru_cache(maxsize=256)
def _all_held_by(holders: tuple[int, ...], pieces: int) -> Holders:
    return Holders((holders,) * pieces)


@functools.lru_cache(maxsize=4096)
def owner(layout: Layout) -> int | None:
    """Returns the process that is the only holder of every box, or None if there is no such process."""
    first = layout.holders[0]
    return first[0] if len(first) == 1 and all(own == first for own in layout.holders) else None
