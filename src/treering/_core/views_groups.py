"""Makes leaves of several other leaves, and leaves of another shape."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import MismatchError
from . import dtypes
from .boxes import Box, box_shape, full_box, intersect, slices
from .views import Leaf, ReadPlan, empty, make_all

if TYPE_CHECKING:
    import numpy as np


def stacked(leaves: Sequence[Leaf], path: str, axis: int) -> Leaf:
    """Returns leaves of one shape and dtype, stacked along a new axis."""

    def plan(box: Box) -> ReadPlan:
        rest = box[:axis] + box[axis + 1 :]
        inner = [leaf.plan_of(rest) for leaf in leaves[slice(*box[axis])]]

        def make(arrays: "list[np.ndarray]") -> "np.ndarray":
            import numpy as np

            out = empty(box_shape(box), leaves[0].array.dtype)
            for n, part in enumerate(make_all(inner, arrays)):
                out[(slice(None),) * axis + (n,)] = part
            return np.asarray(out)

        return ReadPlan([need for one in inner for need in one.needs], make)

    shape = leaves[0].array.shape
    kind = "jax" if leaves[0].array.type == "jax-weak" else leaves[0].array.type
    return leaves[0].made(plan, path=path, shape=(*shape[:axis], len(leaves), *shape[axis:]), type=kind)


def joined(leaves: Sequence[Leaf], path: str, axis: int) -> Leaf:
    """Returns leaves, concatenated along an axis."""
    ends = [0]
    for leaf in leaves:
        ends.append(ends[-1] + leaf.array.shape[axis])
    shape = leaves[0].array.shape
    new_shape = (*shape[:axis], ends[-1], *shape[axis + 1 :])

    def plan(box: Box) -> ReadPlan:
        parts: list[tuple[Box, ReadPlan]] = []
        for leaf, start, stop in zip(leaves, ends, ends[1:], strict=False):
            common = intersect(box, (*box[:axis], (start, stop), *box[axis + 1 :]))
            if common:
                own = (common[axis][0] - start, common[axis][1] - start)
                parts.append((common, leaf.plan_of((*common[:axis], own, *common[axis + 1 :]))))

        def make(arrays: "list[np.ndarray]") -> "np.ndarray":
            out = empty(box_shape(box), leaves[0].array.dtype)
            for (common, _), part in zip(parts, make_all([one for _, one in parts], arrays), strict=True):
                out[slices(common, box)] = part
            return out

        return ReadPlan([need for _, one in parts for need in one.needs], make)

    return leaves[0].made(plan, path=path, shape=new_shape)


def mapped(
    leaves: Sequence[Leaf],
    path: str,
    function: "Callable[..., np.ndarray]",
    shape: tuple[int, ...],
    dtype: str,
    hint: str,
) -> Leaf:
    """Returns the result of a function of entire leaves. These are read again for each box of it."""

    def plan(box: Box) -> ReadPlan:
        inner = [leaf.plan_of(full_box(leaf.array.shape)) for leaf in leaves]

        def make(arrays: "list[np.ndarray]") -> "np.ndarray":
            import numpy as np

            # The function gets copies, because it may change them. A save of a live tree passes the tree's own arrays,
            # and passes them again for the next box.
            found = np.asarray(function(*(array.copy() for array in make_all(inner, arrays))))
            expected = dtypes.to_numpy(dtype)
            if found.shape != shape or found.dtype != expected:
                raise MismatchError(
                    f"{path}: expected {expected}{list(shape)} from the function of a rule, found "
                    f"{found.dtype}{list(found.shape)}; {hint}"
                )
            return found[(*slices(box, full_box(shape)), ...)]  # The ellipsis makes it an array even without axes.

        return ReadPlan([need for one in inner for need in one.needs], make)

    return leaves[0].made(plan, path=path, shape=shape, dtype=dtype)


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
