"""Computes with boxes, and describes the shards and shardings of JAX arrays. It does no I/O.

A box is the half-open range of a piece of an array along each axis: ``((start, stop), …)``.
"""

import bisect
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    import numpy as np

Box = tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=1024)
def full_box(shape: tuple[int, ...]) -> Box:
    """Returns the box of an entire array."""
    return tuple((0, size) for size in shape)


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Returns the box of a tuple of slices with step 1, as JAX describes shards."""
    return tuple((s.start or 0, size if s.stop is None else s.stop) for s, size in zip(index, shape, strict=True))


def box_shape(box: Box) -> tuple[int, ...]:
    """Returns the shape of a box."""
    return tuple([stop - start for start, stop in box])


def intersect(a: Box, b: Box) -> Box | None:
    """Returns the common part of two boxes, or None if it is empty."""
    common = tuple((max(p, q), min(r, s)) for (p, r), (q, s) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def slices(box: Box, origin: Box) -> tuple[slice, ...]:
    """Returns a box as slices of an array that is itself the box `origin`."""
    return tuple(slice(start - o, stop - o) for (start, stop), (o, _) in zip(box, origin, strict=True))


def byte_ranges(shape: Sequence[int], box: Box, itemsize: int, gap: int) -> Iterator[tuple[int, int]]:
    """Yields the byte ranges of a box within a C-ordered array. Ranges less than `gap` bytes apart become one."""
    if not all(stop > start for start, stop in box):
        return
    strides = [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    # A gap along an axis is shorter than the stride of the axis. So from the first axis whose stride is at most `gap`,
    # the bytes from the first to the last element become one range.
    split = next((axis for axis, stride in enumerate(strides) if stride <= gap), len(shape))
    outer = box[:split]
    first = sum(start * stride for (start, _), stride in zip(box[split:], strides[split:], strict=True))
    last = sum((stop - 1) * stride for (_, stop), stride in zip(box[split:], strides[split:], strict=True)) + itemsize
    pending: tuple[int, int] | None = None
    for base in _offsets(outer, strides[:split]):
        begin, end = base + first, base + last
        if pending and begin - pending[1] < gap:
            pending = (pending[0], end)
            continue
        if pending:
            yield pending
        pending = (begin, end)
    if pending:
        yield pending


def split_at_gaps(shape: Sequence[int], box: Box, itemsize: int, gap: int) -> Iterator[Box]:
    """Yields parts of a box of a C-ordered array. In memory, no part spans a gap of `gap` bytes or more.

    The box is cut at every index of its outer axes, those with a stride of more than `gap` bytes. The last of these
    axes stays uncut if its rows follow each other without a gap.
    """
    strides = [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    # As in `byte_ranges`, the gaps from this axis on are shorter than `gap`.
    split = next((axis for axis, stride in enumerate(strides) if stride <= gap), len(shape))
    if all(bounds == (0, size) for bounds, size in zip(box[split:], shape[split:], strict=True)):
        split = max(split - 1, 0)  # The rows of the axis before are complete, so no gap is between them.
    for outer in _positions(box[:split]):
        yield (*((n, n + 1) for n in outer), *box[split:])


def slice_boxes(shape: Sequence[int], itemsize: int, limit: int) -> Iterator[Box]:
    """Yields boxes of at most `limit` bytes whose contents, one after the other, are the array in C order.

    A box has at least one element, even if that is larger than the limit. An array without elements is one box.
    """
    if not shape or 0 in shape:
        yield full_box(tuple(shape))
        return
    axis, inner = 0, itemsize * math.prod(shape[1:])
    while axis < len(shape) - 1 and (inner > limit or shape[axis] == 1):
        axis += 1
        inner = itemsize * math.prod(shape[axis + 1 :])
    rows = max(1, limit // max(inner, 1))
    for outer in _positions(full_box(tuple(shape[:axis]))):
        for start in range(0, shape[axis], rows):
            cut = (start, min(start + rows, shape[axis]))
            yield (*((n, n + 1) for n in outer), cut, *((0, size) for size in shape[axis + 1 :]))


class Cells(Sequence[Box]):
    """The cells of a grid over an array, in C order.

    Each axis is cut at ``cuts[axis]``, from 0 to its size; an axis without elements has the cuts ``(0, 0)``. Grids are
    equal when their cuts are. Raises `ValueError` for cuts that do not ascend from 0.
    """

    def __init__(self, cuts: Iterable[Iterable[int]]):
        self.cuts = tuple(map(tuple, cuts))
        for axis in self.cuts:
            ascending = all(map(operator.lt, axis, axis[1:]))
            if len(axis) < 2 or axis[0] != 0 or not (ascending or axis == (0, 0)):
                raise ValueError(f"an axis is cut at {list(axis)!r:.100}; expected numbers that ascend from 0")
        self.shape = tuple(axis[-1] for axis in self.cuts)
        self._counts = tuple(len(axis) - 1 for axis in self.cuts)
        self._count = math.prod(self._counts)

    @classmethod
    def of(cls, boxes: Sequence[Box]) -> "tuple[Cells, Sequence[int]]":
        """Returns the grid whose cells are these boxes, and for each cell the number of its box.

        Raises `ValueError` for boxes that overlap, leave holes or form no grid. In a grid, each cut of an axis divides
        the entire array.
        """
        if isinstance(boxes, cls):
            return boxes, range(len(boxes))
        ends = ({stop for _, stop in axis} for axis in zip(*boxes, strict=True))
        grid = cls(sorted({0} | stops) if any(stops) else (0, 0) for stops in ends)
        numbers = {box: n for n, box in enumerate(boxes)}
        if not len(grid) == len(numbers) == len(boxes) or numbers.keys() != set(grid):
            raise ValueError("the boxes are not the cells of a grid")
        return grid, [numbers[box] for box in grid]

    def overlapping(self, box: Box) -> Iterator[int]:
        """Yields the numbers of the cells that have elements of a box."""
        axes = [
            range(bisect.bisect_right(axis, start) - 1, bisect.bisect_left(axis, stop)) if start < stop else ()
            for axis, (start, stop) in zip(self.cuts, box, strict=True)
        ]
        for place in itertools.product(*axes):
            number = 0
            for count, n in zip(self._counts, place, strict=True):
                number = number * count + n
            yield number

    def sizes(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Returns the number of elements of each cell."""
        import numpy as np

        lengths = [np.diff(np.array(axis, np.int64)) for axis in self.cuts]
        if all((own == own[0]).all() for own in lengths):
            return np.broadcast_to(np.int64(math.prod(int(own[0]) for own in lengths)), len(self))
        return functools.reduce(np.multiply.outer, lengths, np.ones((), np.int64)).reshape(-1)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(self._count))]
        if not -self._count <= number < self._count:
            raise IndexError(number)
        number %= self._count
        box: list[tuple[int, int]] = []
        for axis, count in zip(reversed(self.cuts), reversed(self._counts), strict=True):
            number, n = divmod(number, count)
            box.append((axis[n], axis[n + 1]))
        return tuple(reversed(box))

    def __iter__(self) -> Iterator[Box]:
        return itertools.product(*(itertools.pairwise(axis) for axis in self.cuts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cells) and other.cuts == self.cuts

    def __hash__(self) -> int:
        return hash(self.cuts)


def _positions(box: Box) -> Iterator[tuple[int, ...]]:
    """Yields every position in a box, in C order.

    `itertools.product` is not used, because it first makes a list of each range. A damaged file may claim an axis of
    any length, and the list would fill the memory.
    """
    if not box:
        yield ()
        return
    for n in range(*box[0]):
        for rest in _positions(box[1:]):
            yield (n, *rest)


def _offsets(box: Box, strides: Sequence[int]) -> Iterator[int]:
    """Yields the offset in bytes of every position in a box, in C order."""
    if not box:
        yield 0
        return
    (start, stop), *inner = box
    for i in range(start, stop):
        for offset in _offsets(tuple(inner), strides[1:]):
            yield i * strides[0] + offset


def local_shards(array: "jax.Array") -> list[tuple[Box, Any]]:
    """Returns the distinct shards of an array on the devices of this process, each once even if it is replicated."""
    found: dict[Box, Any] = {}
    for shard in array.addressable_shards:
        box = box_of(shard.index, array.shape)
        if box not in found:
            found[box] = shard.data
    return list(found.items())


def spec_axes(spec: "jax.sharding.PartitionSpec") -> tuple[Any, ...]:
    """Returns the entry of a spec for each axis. JAX refuses to iterate over a spec with reduced or unreduced axes."""
    return spec.partitions if hasattr(spec, "partitions") else tuple(spec)


def sharding_to_json(sharding: "jax.sharding.Sharding") -> dict[str, Any] | None:
    """Returns a `NamedSharding` as JSON: the sizes of the mesh axes, and the spec.

    Returns None for other shardings: the manifest describes these by the boxes of their shards. Also returns None if
    an axis name is not text, because JSON would turn it into text.
    """
    mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", None)
    if mesh is None or spec is None:
        return None
    axes = [list(part) if isinstance(part, tuple) else part for part in spec_axes(spec)]
    if not all(part is None or isinstance(part, str | list) for part in axes):
        return None
    names = [*mesh.shape, *(name for part in axes if isinstance(part, list) for name in part)]
    if not all(type(name) is str for name in names):
        return None
    return {"mesh": dict(mesh.shape), "spec": axes}
