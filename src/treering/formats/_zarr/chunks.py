"""The chunks of arrays: shapes that do not cross what a process has, and the process that writes each."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..._core import dtypes
from ..._core.boxes import Box, Cells, box_shape, whole
from ..._core.entries import ArrayEntry
from ..._processes.assignment import Layout, held_by
from ..._processes.calls import Call

_MAX_PARTS = 64  # parts into which a dimension is cut at once; more only where there is no other way
_LEAST = 1 << 16  # bytes of a chunk below which what a process has is rather one chunk, however large


class Chunks(NamedTuple):
    """The chunks of an array, and those that this process writes; None where it writes all."""

    shape: Sequence[int]
    own: frozenset[Box] | None = None

    def written(self, shape: Sequence[int]) -> Iterator[Box]:
        """The boxes of the chunks of an array of a shape that this process writes, in C order."""
        for box in _grid(whole(shape), self.shape):
            if self.own is None or box in self.own:
                yield box


def divided(shape: Sequence[int], itemsize: int, most: int) -> list[int]:
    """The shape of chunks of at most `most` bytes that divide an array evenly, its largest dimension first."""
    chunk = list(shape)
    while math.prod(chunk) * itemsize > most and max(chunk) > 1:
        factors = [_least_factor(size) for size in chunk]
        axis = max(range(len(chunk)), key=lambda axis: (1 < factors[axis] <= _MAX_PARTS, chunk[axis]))
        chunk[axis] //= factors[axis]
    return chunk


def assigned(
    call: Call,
    entries: Sequence[ArrayEntry],
    layouts: Mapping[str, Layout],
    most: int,
    shape: Callable[[ArrayEntry], Sequence[int]],
) -> dict[str, Chunks]:
    """The chunks of arrays by path; the same in every process but for those that it writes itself.

    An array in `layouts` lies in several processes in regular parts, which are cut up into chunks of at most `most`
    bytes where that comes out even. Every process has the others whole: they have chunks of what `shape` says. Each
    chunk is written by that of its holders which has the least to write.
    """
    if call.count == 1:
        return {entry.path: Chunks(shape(entry)) for entry in entries}
    loads = [0] * call.count
    everyone = tuple(range(call.count))
    spread = {
        entry.path: layouts.get(entry.path) or held_by(Cells.of([whole(entry.shape)])[0], everyone) for entry in entries
    }
    found: dict[str, Chunks] = {}
    # Those that few have come first, and large ones: the others even out what each has to write.
    for entry in sorted(entries, key=lambda entry: (max(map(len, spread[entry.path].holders)), -entry.nbytes)):
        layout, itemsize = spread[entry.path], dtypes.itemsize(entry.dtype)
        chunk = shape(entry) if len(layout.boxes) == 1 else _even_part(box_shape(layout.boxes[0]), itemsize, most)
        nbytes = itemsize * math.prod(chunk)
        own: list[Box] = []
        for cell, holders in zip(layout.boxes, layout.holders, strict=True):
            for box in _grid(cell, chunk):
                writer = min(holders, key=loads.__getitem__)
                loads[writer] += nbytes
                if writer == call.index:
                    own.append(box)
        found[entry.path] = Chunks(chunk, frozenset(own))
    return found


def _even_part(shape: Sequence[int], itemsize: int, most: int) -> list[int]:
    """The shape of chunks that divide an array evenly; one chunk where they would be tiny, for lack of factors."""
    chunk = divided(shape, itemsize, most)
    tiny = math.prod(chunk) * itemsize < min(_LEAST, math.prod(shape) * itemsize)
    return [max(size, 1) for size in (shape if tiny else chunk)]


def _grid(box: Box, chunk: Sequence[int]) -> Iterator[Box]:
    """The chunks in a box, which begins where one of them does."""
    axes = (
        [(n, min(n + size, stop)) for n in range(start, stop, size)]
        for (start, stop), size in zip(box, chunk, strict=True)
    )
    return itertools.product(*axes)


def _least_factor(number: int) -> int:
    """The least prime factor; 1 of 1."""
    return next((n for n in range(2, math.isqrt(number) + 1) if number % n == 0), number)
