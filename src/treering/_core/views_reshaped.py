"""Makes leaves of another shape. It finds the rows of the old shape that contain a box of the new shape."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .boxes import Box, box_shape
from .views import Leaf, ReadPlan, empty

if TYPE_CHECKING:
    import numpy as np


def reshaped(leaf: Leaf, shape: tuple[int, ...]) -> Leaf:
    """Returns the leaf in another shape of the same size.

    Old and new axes that become each other form a group. Within a group, all rows between the first and the last
    wanted element are read. Groups are independent, so a box along other axes reads nothing more.
    """
    old = leaf.array.shape

    def plan(box: Box) -> ReadPlan:
        if not math.prod(box_shape(box)):
            return ReadPlan([], lambda arrays: empty(box_shape(box), leaf.array.dtype))
        source: list[tuple[int, int]] = []
        sizes, skipped = [], []  # of each group: the elements that are read, and how many come before the first wanted
        groups = _groups(old, shape)
        for before, after in groups:
            first = _flat([start for start, _ in box[after]], shape[after])
            last = _flat([stop - 1 for _, stop in box[after]], shape[after])
            rows = _covering(old[before], first, last)
            source += rows
            sizes.append(math.prod(box_shape(rows)))
            skipped.append(first - _flat([start for start, _ in rows], old[before]))
        inner = leaf.plan_of(tuple(source))

        def make(arrays: "list[np.ndarray]") -> "np.ndarray":
            import numpy as np

            flat = np.ascontiguousarray(inner.make(arrays)).reshape(-1)
            steps = [math.prod(sizes[n + 1 :]) for n in range(len(sizes))]  # elements between neighbors in a group
            begin = sum(count * step for count, step in zip(skipped, steps, strict=True))
            strides = [
                flat.itemsize * step * math.prod(shape[axis + 1 : after.stop])
                for (_, after), step in zip(groups, steps, strict=True)
                for axis in range(after.start, after.stop)
            ]
            return np.lib.stride_tricks.as_strided(flat[begin:], box_shape(box), strides)

        return ReadPlan(inner.needs, make)

    return leaf.made(plan, shape=shape)


def _flat(position: Sequence[int], shape: Sequence[int]) -> int:
    """Returns the number of elements before a position, in C order."""
    found = 0
    for index, size in zip(position, shape, strict=True):
        found = found * size + index
    return found


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """Returns the axes of two shapes of one size, in the smallest groups that have the same size in both.

    The size must not be 0.
    """
    found: list[tuple[slice, slice]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        first, second = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (a := math.prod(old[first:i])) != (b := math.prod(new[second:j])):
            i, j = (i + 1, j) if a < b else (i, j + 1)
        found.append((slice(first, i), slice(second, j)))
    return found


def _covering(shape: tuple[int, ...], first: int, last: int) -> Box:
    """Returns the smallest box whose elements are contiguous in C order and include those from `first` to `last`."""
    low, high = _position(first, shape), _position(last, shape)
    differ = next((axis for axis in range(len(shape)) if low[axis] != high[axis]), len(shape))
    return tuple(
        (a, b + 1) if axis <= differ else (0, size)
        for axis, (a, b, size) in enumerate(zip(low, high, shape, strict=True))
    )


def _position(flat: int, shape: tuple[int, ...]) -> list[int]:
    found: list[int] = []
    for size in reversed(shape):
        flat, index = divmod(flat, size)
        found.append(index)
    return found[::-1]
