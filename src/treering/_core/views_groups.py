"""Makes leaves of several other leaves."""

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
