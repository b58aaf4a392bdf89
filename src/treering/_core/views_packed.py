"""Makes leaves of codes of a few bits, several of which share an element of an array, and the reverse."""

import dataclasses
from typing import TYPE_CHECKING, Any

from . import dtypes
from .boxes import Box, box_shape
from .views import Leaf, ReadPlan

if TYPE_CHECKING:
    import numpy as np


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
        """Returns words of codes of 8 bits each, of which the lowest count."""
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
