"""Chooses the chunks of arrays that several processes write, and the process that writes each.

A chunk never spans the parts of two processes, so that no process needs another's data.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..._core import dtypes
from ..._core.boxes import Box, Cells, box_shape, full_box
from ..._core.calls import Call
from ..._core.entries import ArrayEntry
from ..._core.layouts import Layout, held_by

_MAX_PARTS = 64  # parts into which a dimension is cut in one step; more only if no smaller factor exists
_MIN_CHUNK_BYTES = 1 << 16  # bytes; if even chunks would be smaller, a process's part becomes one chunk of any size


class Chunks(NamedTuple):
    """Describes the chunks of an array: their shape, and the boxes that this process writes (None: all)."""

    shape: Sequence[int]
    own: frozenset[Box] | None = None

    def written(self, shape: Sequence[int]) -> Iterator[Box]:
        """Yields the boxes that this process writes of an array of the given shape, in C order."""
        for box in _grid(full_box(shape), self.shape):
            if self.own is None or box in self.own:
                yield box


def even_chunk_shape(shape: Sequence[int], itemsize: int, max_bytes: int) -> list[int]:
    """Returns the shape of chunks of at most `max_bytes` that divide an array evenly; cuts its largest axis first."""
    chunk = list(shape)
    while math.prod(chunk) * itemsize > max_bytes and max(chunk) > 1:
        factors = [_least_factor(size) for size in chunk]
        axis = max(range(len(chunk)), key=lambda axis: (1 < factors[axis] <= _MAX_PARTS, chunk[axis]))
        chunk[axis] //= factors[axis]
    return chunk


def assign_chunks(
    call: Call,
    entries: Sequence[ArrayEntry],
    layouts: Mapping[str, Layout],
    max_bytes: int,
    shape: Callable[[ArrayEntry], Sequence[int]],
) -> dict[str, Chunks]:
    """Assigns the chunks of arrays, by path. Only `Chunks.own` differs between the processes.

    An array in `layouts` is spread over the processes in regular parts. They are cut into chunks of at most `max_bytes`
    bytes if these divide them evenly. Every process holds all of the other arrays; `shape` gives their chunk shape.
    Of the processes that hold a chunk, the one with the fewest bytes to write so far writes it.
    """
    if call.count == 1:
        return {entry.path: Chunks(shape(entry)) for entry in entries}
    loads = [0] * call.count
    everyone = tuple(range(call.count))
    spread = {
        entry.path: layouts.get(entry.path) or held_by(Cells.of([full_box(entry.shape)])[0], everyone)
        for entry in entries
    }
    found: dict[str, Chunks] = {}
    # Chunks with few holders come first, and large arrays: the rest can then even out the bytes of each process.
    for entry in sorted(entries, key=lambda entry: (max(map(len, spread[entry.path].holders)), -entry.nbytes)):
        layout, itemsize = spread[entry.path], dtypes.itemsize(entry.dtype)
        chunk = shape(entry) if len(layout.boxes) == 1 else _even_part(box_shape(layout.boxes[0]), itemsize, max_bytes)
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


def _even_part(shape: Sequence[int], itemsize: int, max_bytes: int) -> list[int]:
    """Returns the shape of chunks that divide an array evenly, or one chunk if these would be tiny."""
    chunk = even_chunk_shape(shape, itemsize, max_bytes)
    tiny = math.prod(chunk) * itemsize < min(_MIN_CHUNK_BYTES, math.prod(shape) * itemsize)
    return [max(size, 1) for size in (shape if tiny else chunk)]


def _grid(box: Box, chunk: Sequence[int]) -> Iterator[Box]:
    """Yields the chunks in a box that begins at the start of a chunk."""
    axes = (
        [(n, min(n + size, stop)) for n in range(start, stop, size)]
        for (start, stop), size in zip(box, chunk, strict=True)
    )
    return itertools.product(*axes)


def _least_factor(number: int) -> int:
    """Returns the least prime factor of a number; 1 for 1."""
    return next((n for n in range(2, math.isqrt(number) + 1) if number % n == 0), number)
