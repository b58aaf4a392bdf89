"""Unpacks codes of a few bits, which share elements of an array, into leaves, and packs them.

Codes become numbers by arithmetic with scales: in float32, in parts that stay in the cache.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .._threads.pool import in_parallel
from ..errors import CorruptError, MismatchError
from . import casts, dtypes
from .boxes import Box, box_shape, full_box, intersect, slice_boxes, slices
from .views import Leaf, ReadPlan, empty, make_all

if TYPE_CHECKING:
    import numpy as np

_PART_BYTES = 1024 << 10  # of a part in float32; it and what is made of it fit the cache of a core


@dataclasses.dataclass(frozen=True)
class Packing:
    """How neighbors along an axis share an element, which is called a word here.

    axis: counted from 0.
    bits: the bits of a code: 1, 2, 4 or 8.
    places: the position in a word's row of codes of the code in the lowest bits, of that in the next bits, and so on.
    """

    axis: int
    bits: int
    places: tuple[int, ...]

    @classmethod
    def of(cls, words: str, bits: int, axis: int) -> "Packing":
        """Returns the packing into words of a dtype that begins with the lowest bits."""
        return cls(axis, bits, tuple(range(8 * dtypes.itemsize(words) // bits)))

    def shape(self, words: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the codes in words of a shape."""
        return (*words[: self.axis], words[self.axis] * len(self.places), *words[self.axis + 1 :])

    def words(self, box: Box) -> Box:
        """Returns the box of the words that have the codes of a box."""
        start, stop = box[self.axis]
        count = len(self.places)
        return (*box[: self.axis], (start // count, -(-stop // count)), *box[self.axis + 1 :])

    def codes(self, words: Box) -> Box:
        """Returns the box of all codes in a box of words."""
        start, stop = words[self.axis]
        count = len(self.places)
        return (*words[: self.axis], (start * count, stop * count), *words[self.axis + 1 :])

    def unpack(self, words: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Returns the codes in words, as uint8."""
        import numpy as np

        count = len(self.places)
        in_order = self.places == tuple(range(count))
        words = _contiguous(words)
        if in_order and self.bits in (4, 8) and self.axis == words.ndim - 1:
            data = words.view(np.uint8)
            if self.bits == 8:
                return data
            pairs = data.astype(np.uint16)  # The lower byte gets the lower half. No step works on single codes.
            pairs |= pairs << 4
            pairs &= 0x0F0F
            return pairs.view(np.uint8)
        outer, inner = words.shape[: self.axis + 1], words.shape[self.axis + 1 :]
        out = np.empty((*outer, count, *inner), np.uint8)
        rows = np.moveaxis(out, self.axis + 1, 0)
        mask = words.dtype.type((1 << self.bits) - 1)
        for n, place in enumerate(self.places):
            rows[place] = (words >> words.dtype.type(n * self.bits)) & mask
        return out.reshape(self.shape(words.shape))

    def pack(self, codes: "np.ndarray[Any, Any]", words: "np.dtype[Any]") -> "np.ndarray[Any, Any]":
        """Returns words of codes of 8 bits each. Only the lowest bits of a code count."""
        import numpy as np

        count = len(self.places)
        size = codes.shape[self.axis] // count
        rows = np.moveaxis(
            codes.reshape(*codes.shape[: self.axis], size, count, *codes.shape[self.axis + 1 :]), self.axis + 1, 0
        )
        wide = np.dtype(f"u{words.itemsize}")
        out = np.zeros(rows.shape[1:], wide)
        for n, place in enumerate(self.places):
            out |= (rows[place] & ((1 << self.bits) - 1)).astype(wide) << wide.type(n * self.bits)
        return out.view(words)


def _contiguous(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Returns an array in C order. If its last two axes were transposed, this takes a fifth of NumPy's own time.

    NumPy would read down the columns of a large array, whose rows often are a power of two bytes apart and so share few
    places in the cache. A copy of the rows comes first; the columns of that are closer.
    """
    import numpy as np

    if array.ndim > 1 and array.strides[-1] > array.strides[-2] == array.itemsize:
        array = np.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2)
    return np.ascontiguousarray(array)


def unpacked(leaf: Leaf, packing: Packing, dtype: str = "uint8", offset: int = 0, size: int | None = None) -> Leaf:
    """Returns the codes that share the elements of a leaf.

    dtype: uint8, or a dtype of four bits.
    offset: what was added to each code before it was packed.
    size: the codes along the axis, if the last word has room for more.
    """
    full = packing.shape(leaf.array.shape)
    shape = (*full[: packing.axis], full[packing.axis] if size is None else size, *full[packing.axis + 1 :])

    def plan(box: Box) -> ReadPlan:
        inner = leaf.plan_of(packing.words(box))

        def make(arrays: "list[np.ndarray]") -> "np.ndarray":
            import numpy as np

            codes = packing.unpack(inner.make(arrays))
            start, stop = box[packing.axis]
            skipped = start % len(packing.places)
            own = codes[(slice(None),) * packing.axis + (slice(skipped, skipped + stop - start),)]
            if offset:
                own = own - np.uint8(offset)  # wraps, as a two's complement does
            elif dtype == "int4":
                own = (own ^ np.uint8(8)) - np.uint8(8)  # extends the sign
            return np.ascontiguousarray(own).reshape(box_shape(box)).view(dtypes.to_numpy(dtype))

        return ReadPlan(inner.needs, make)

    return leaf.made(plan, dtype=dtype, shape=shape, type=_strong(leaf))


def packed(leaf: Leaf, packing: Packing, dtype: str, offset: int = 0) -> Leaf:
    """Returns words of a dtype that have the codes of a leaf. Their number along the axis must fill all words."""
    count = len(packing.places)
    shape = leaf.array.shape
    size = shape[packing.axis] // count

    def plan(box: Box) -> ReadPlan:
        inner = leaf.plan_of(packing.codes(box))

        def make(arrays: "list[np.ndarray]") -> "np.ndarray":
            import numpy as np

            codes = np.ascontiguousarray(inner.make(arrays)).view(np.uint8)
            return packing.pack(codes + np.uint8(offset) if offset else codes, dtypes.to_numpy(dtype))

        return ReadPlan(inner.needs, make)

    made = (*shape[: packing.axis], size, *shape[packing.axis + 1 :])
    return leaf.made(plan, dtype=dtype, shape=made, type=_strong(leaf))


def _strong(leaf: Leaf) -> Any:
    return "jax" if leaf.array.type == "jax-weak" else leaf.array.type


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

    packing, size: how codes share the elements of the leaf; see `unpacked`.
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
