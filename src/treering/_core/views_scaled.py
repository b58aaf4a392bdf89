"""Makes leaves by arithmetic of codes with scales: in float32, in parts that stay in the cache."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .._threads.pool import in_parallel
from ..errors import CorruptError, MismatchError
from . import casts, dtypes
from .boxes import Box, box_shape, full_box, intersect, slice_boxes, slices
from .views import Leaf, ReadPlan, empty, make_all
from .views_packed import Packing

if TYPE_CHECKING:
    import numpy as np

_PART_BYTES = 1024 << 10  # of a part in float32; it and what is made of it fit the cache of a core


class Step(NamedTuple):
    """One operation with an operand, which is broadcast to blocks of the leaf.

    operand: a number, or a leaf with one element for each block.
    block: the size of a block along each axis. Blocks at the ends may be smaller.
    order: an integer for each position along `axis`: the position along it in the operand, instead of the block's.
    rounds_to: the dtype to which the library rounds the result of this step.
    check: is called with each array of the operand that was read.
    """

    function: Literal["add", "subtract", "multiply", "divide"]
    operand: Leaf | float
    block: tuple[int, ...] = ()
    order: Leaf | None = None
    axis: int = 0
    rounds_to: str = ""
    check: "Callable[[np.ndarray], None] | None" = None

    def cells(self, box: Box) -> Box:
        """Returns the box of the operand that a box needs."""
        assert isinstance(self.operand, Leaf)
        own = [(a // size, (b - 1) // size + 1) for (a, b), size in zip(box, self.block, strict=True)]
        if self.order is not None:
            own[self.axis] = (0, self.operand.array.shape[self.axis])
        return tuple(own)

    def plans(self, box: Box) -> list[ReadPlan]:
        """Returns the plans for the operand and the order."""
        if not isinstance(self.operand, Leaf):
            return []
        order = [] if self.order is None else [self.order.plan_of((box[self.axis],))]
        return [self.operand.plan_of(self.cells(box)), *order]

    def bound(self, arrays: "Sequence[np.ndarray]", box: Box) -> "_Bound":
        """Returns the step with the arrays that its plans for a box have read."""
        import numpy as np

        if not isinstance(self.operand, Leaf):
            return _Bound(self, np.float32(self.operand), (), None, 0)
        if self.check is not None:
            self.check(arrays[0])
        cells, factors = self.cells(box), _as_float32(arrays[0])
        if self.order is None:
            return _Bound(self, factors, cells, None, 0)
        assert self.order is not None
        order, count = arrays[1].astype(np.int64), factors.shape[self.axis]
        if order.size and not 0 <= order.min() <= order.max() < count:
            wrong = order[(order < 0) | (order >= count)][0]
            raise CorruptError(
                f"{self.order.entry.path}: expected numbers of groups from 0 to {count - 1}, found {wrong}; the "
                "file is damaged, or of another tool"
            )
        start, stop = box[self.axis]
        if (order == np.arange(start, stop) // self.block[self.axis]).all():
            order = None  # Then it says nothing new, as in most files.
        return _Bound(self, factors, cells, order, start)


class _Bound(NamedTuple):
    step: Step
    factors: Any
    cells: Box
    order: "np.ndarray[Any, Any] | None"
    first: int  # the position of the order's first element

    def apply(self, values: "np.ndarray[Any, Any]", box: Box) -> None:
        """Computes in place with the values of a box."""
        import numpy as np

        factors, shape, own = self.factors, [], []
        if self.cells:
            for axis, ((start, stop), (first, _), size) in enumerate(
                zip(box, self.cells, self.step.block, strict=True)
            ):
                if self.order is not None and axis == self.step.axis:
                    factors = factors.take(self.order[start - self.first : stop - self.first], axis)
                    shape.append(stop - start)
                    own.append(stop - start)
                    continue
                low, high = start // size - first, (stop - 1) // size + 1 - first
                factors = factors[(slice(None),) * axis + (slice(low, high),)]
                if high - low == 1 or size == 1:
                    shape.append(stop - start)
                    own.append(high - low)
                elif start % size == 0 and stop % size == 0:  # An axis for the blocks, and one within them.
                    shape += [high - low, size]
                    own += [high - low, 1]
                else:
                    factors = factors.take(np.arange(start, stop) // size - low - first, axis)
                    shape.append(stop - start)
                    own.append(stop - start)
            values, factors = values.reshape(shape), factors.reshape(own)
        getattr(np, self.step.function)(values, factors, out=values)
        if self.step.rounds_to:
            values[...] = dtypes.convert(values, dtypes.to_numpy(self.step.rounds_to))


def scaled(
    leaf: Leaf,
    steps: Sequence[Step],
    dtype: str,
    *,
    packing: Packing | None = None,
    size: int | None = None,
    codes: str = "",
    table: "np.ndarray[Any, Any] | None" = None,
    may_overflow: bool = True,
) -> Leaf:
    """Returns the results of steps with each element of a leaf, computed in float32 and cast to `dtype`.

    Reading it raises `MismatchError` if finite numbers do not fit `dtype`.

    packing, size: how codes share the elements of the leaf; see `views_packed.unpacked`.
    codes: the dtype of the codes, if it is not that of the leaf.
    table: the float32 value of each code, if it is not the code itself.
    may_overflow: True if products beyond float32 are infinities, as in the library that wrote the codes, and no error.
    """
    full = leaf.array.shape if packing is None else packing.shape(leaf.array.shape)
    if packing is not None and size is not None:
        full = (*full[: packing.axis], size, *full[packing.axis + 1 :])
    values_of = _values(codes or ("uint8" if packing else leaf.array.dtype), table)

    def plan(box: Box) -> ReadPlan:
        if not math.prod(box_shape(box)):
            return ReadPlan([], lambda arrays: empty(box_shape(box), dtype))
        words = box if packing is None else packing.words(box)
        inner = [leaf.plan_of(words), *(own for step in steps for own in step.plans(box))]

        def make(arrays: "list[np.ndarray]") -> "np.ndarray":
            import numpy as np

            found = make_all(inner, arrays)
            stored = next(found)
            bound = [step.bound([next(found) for _ in step.plans(box)], box) for step in steps]
            out = np.asarray(empty(box_shape(box), dtype))

            def fill(part: Box) -> None:
                there = tuple((a + o, b + o) for (a, b), (o, _) in zip(part, words, strict=True))
                array, own = stored[(*slices(part, full_box(stored.shape)), ...)], there
                if packing is not None:
                    array, all_of_it = packing.unpack(array), packing.codes(there)
                    own = intersect(all_of_it, box)
                    assert own is not None
                    if own != all_of_it:
                        array = array[slices(own, all_of_it)]
                with np.errstate(all="ignore"):  # NaNs stay NaNs
                    values = values_of(array)
                    try:
                        with np.errstate(over="ignore" if may_overflow else "raise"):
                            for step in bound:
                                step.apply(values, own)
                    except FloatingPointError:
                        scales = " and ".join(s.operand.entry.path for s in steps if isinstance(s.operand, Leaf))
                        raise MismatchError(
                            f"{leaf.entry.path}: expected products with {scales} within float32, found some beyond it; "
                            "leave all as they are, and multiply them in float64"
                        ) from None
                    np.copyto(out[(*slices(own, box), ...)], values, casting="unsafe")
                if not casts.is_in_range(values, out.dtype):
                    casts.cast(values, out.dtype, leaf.entry.path, can_clip=False)

            each = 4 if packing is None else 4 * len(packing.places)
            in_parallel([*slice_boxes(stored.shape, each, _PART_BYTES)], fill)
            return out

        return ReadPlan([need for one in inner for need in one.needs], make)

    kind = "jax" if leaf.array.type == "jax-weak" else leaf.array.type
    return leaf.made(plan, dtype=dtype, shape=full, type=kind)


def _values(codes: str, table: "np.ndarray[Any, Any] | None") -> "Callable[[np.ndarray], np.ndarray]":
    """Returns a function that makes new float32 arrays of codes of a dtype."""

    def lookup(array: "np.ndarray") -> "np.ndarray":
        import numpy as np

        every = _every(codes) if table is None else table
        # NumPy takes positions of this type, and wraps them, faster than others. All of them are in the table.
        return np.asarray(np.take(every, array.view(np.uint8).astype(np.intp), mode="wrap"))

    if table is None and (codes in ("int8", "uint8") or dtypes.itemsize(codes) > 1):
        return _as_float32
    return functools.partial(_of_e4m3, lookup) if table is None and codes == "float8_e4m3fn" else lookup


def _of_e4m3(lookup: "Callable[[np.ndarray], np.ndarray]", array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Returns float8_e4m3fn numbers as float32. Moving their bits is three times as fast as a look-up."""
    import numpy as np

    codes = array.view(np.int8)
    if ((codes & 0x7F) == 0x7F).any():  # The bits of a NaN would become a number.
        return lookup(array)
    bits = codes.astype(np.int32, order="C")  # extends the sign
    bits <<= 20
    bits &= np.int32(-0x78100000)  # sign, four bits of the exponent, three of the mantissa
    values = bits.view(np.float32)
    values *= np.float32(2.0**120)  # the difference of the exponents' biases
    return values


@functools.lru_cache(maxsize=64)
def _every(codes: str) -> "np.ndarray[Any, Any]":
    """Returns the value of each code of one byte."""
    import numpy as np

    return np.arange(256, dtype=np.uint8).view(dtypes.to_numpy(codes)).astype(np.float32)


def _as_float32(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Returns a new float32 array with the same values."""
    import numpy as np

    return array.astype(np.float32, order="C")
