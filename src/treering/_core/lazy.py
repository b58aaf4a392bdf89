"""Defines `LazyArray`, an array that is still in its checkpoint."""

import math
import operator
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import TreeringError, UnsupportedError
from . import dtypes
from .boxes import Box, full_box
from .entries import ArrayEntry
from .source import Source

if TYPE_CHECKING:
    import jax
    import numpy as np

_COPIED_BYTES = 16 << 20  # slices of up to so many bytes are copied
_AHEAD_BYTES = 16 << 20  # of arrays that are read together
_PICTURE_BYTES = 4 << 20  # a notebook shows a picture of arrays up to this size
_SMALL_BYTES = 1 << 20  # An array of more is worth a request of its own.


class LazyArray:
    """An array that is still in its checkpoint. Slicing reads only what the slice needs, and checks it.

    >>> ckpt["params/w"][100:200, :]
    """

    def __init__(self, reader: Source, entry: ArrayEntry, origin: tuple[Mapping[str, Any], str] | None = None):
        self._reader, self._entry = reader, entry
        self._origin = origin  # the open checkpoint and the path that it has there

    def __reduce__(self) -> Any:
        if self._origin is None:
            raise UnsupportedError(f"{self._entry.path}: an array of a tree that is being saved cannot be pickled")
        return operator.getitem, self._origin

    def __copy__(self) -> "LazyArray":
        return self  # It does not change.

    def __deepcopy__(self, memo: Any) -> "LazyArray":
        return self

    @property
    def entry(self) -> ArrayEntry:
        """The checkpoint's entry of the array."""
        return self._entry

    def part(self, box: Box) -> "LazyPart":
        """Returns a box of the array, which is read when it becomes a NumPy array."""
        return LazyPart(self._reader, self._entry, box)

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape. Typed PRNG keys have the shape of their uint32 data."""
        return self._entry.shape

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The NumPy dtype. For dtypes that NumPy lacks it is the one of ml_dtypes."""
        return dtypes.to_numpy(self._entry.dtype)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the array on disk, in bytes."""
        return self.size * dtypes.itemsize(self._entry.dtype)

    @property
    def sharding(self) -> "jax.sharding.NamedSharding | None":
        """The sharding of the array when it was saved, on a mesh without devices, or None if it had none."""
        return recorded_sharding(self.place)

    @property
    def place(self) -> "Mapping[str, Any] | None":
        """The place of the array when it was saved, as the checkpoint records it."""
        return self._reader.sharding(self._entry)

    def __getitem__(self, index: Any) -> Any:
        """Reads a part of the array by basic indexing as in NumPy: integers, slices with any step, and an ellipsis."""
        box, rest = _bounds(index, self.shape)
        (array,) = self._reader.read([(self._entry, box)])
        # With an ellipsis NumPy always returns an array, even one without axes, and never a scalar.
        parts = index if isinstance(index, tuple) else (index,)
        found = array[(*rest, ...)] if any(part is ... for part in parts) else array[rest]
        # A small slice must not keep an entire file mapped.
        return found.copy() if found.nbytes <= _COPIED_BYTES else found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "np.ndarray[Any, Any]":
        import numpy as np

        if copy is False:
            raise ValueError("an array in a checkpoint cannot become a NumPy array without reading it")
        (array,) = self._reader.read([(self._entry, full_box(self.shape))])
        return np.asarray(array, dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def _repr_html_(self) -> str:
        from . import printing, units
        from .describe import describe_entry

        about = [("array", describe_entry(self._entry)), ("size", units.nbytes(self.nbytes))]
        about += [("sharding", text)] if (text := units.sharding(self.place)) else []
        return printing.page(
            self._entry.path or "(root)", printing.table([*about, ("in", self._reader.path)]), self._picture()
        )

    def _picture(self) -> str:
        """Returns the array as a picture if it is small; an error as text, because a notebook would hide it."""
        import numpy as np

        from . import printing
        from .printing import heat_map

        is_number = self._entry.type != "key" and self.dtype.kind not in "MmUSO"
        if not is_number or self.size < 2 or self.nbytes > _PICTURE_BYTES:
            return ""
        try:
            return heat_map(np.asarray(self))
        except TreeringError as error:
            return printing.line(str(error))

    def __repr__(self) -> str:
        from .describe import describe_entry

        return f"<LazyArray {self._entry.path!r} {describe_entry(self._entry)}>"


def read_ahead(leaves: Sequence[Any]) -> list[Any]:
    """Returns the leaves. Each `LazyArray` reads small ones that follow it, too, if it is the first that is read."""
    wanted: dict[int, list[ArrayEntry]] = {}
    for leaf in leaves:
        if isinstance(leaf, LazyArray):
            wanted.setdefault(id(leaf._reader), []).append(leaf.entry)
    ahead: dict[int, Any] = {}  # They have all methods of a source.
    for leaf in leaves:
        if isinstance(leaf, LazyArray) and (own := id(leaf._reader)) not in ahead:
            ahead[own] = ReadAhead(leaf._reader, wanted[own])
    return [LazyArray(ahead[id(one._reader)], one.entry) if isinstance(one, LazyArray) else one for one in leaves]


class ReadAhead:
    """A source that reads small arrays together, for a caller that asks for one after the other.

    Each is read once, if the caller asks for it once. The arrays that were read and not asked for yet take at most 16
    MiB. Then others are read one by one.

    entries: the arrays that the caller is going to ask for, probably in this order.
    """

    def __init__(self, source: Source, entries: Iterable[ArrayEntry]):
        self._source = source
        self._unread = {one.path: one for one in entries if 0 < one.nbytes <= _SMALL_BYTES}
        self._held: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, wanted: "Sequence[tuple[ArrayEntry, Box]]", **options: Any) -> "list[np.ndarray]":
        if len(wanted) == 1 and wanted[0][1] == full_box(wanted[0][0].shape):
            path = wanted[0][0].path
            with self._lock:
                if path in self._unread:
                    self._read_with_others(path, **options)
                if path in self._held:
                    return [self._held.pop(path)]
        return self._source.read(wanted, **options)

    def _read_with_others(self, path: str, **options: Any) -> None:
        room = _AHEAD_BYTES - sum(array.nbytes for array in self._held.values())
        batch = [self._unread.pop(path)]
        for one in self._unread.values():
            room -= one.nbytes
            if room < 0:
                break
            batch.append(one)
        arrays = self._source.read([(one, full_box(one.shape)) for one in batch], **options)
        for one, array in zip(batch, arrays, strict=True):
            self._unread.pop(one.path, None)
            self._held[one.path] = array


def recorded_sharding(place: "Mapping[str, Any] | None") -> "jax.sharding.NamedSharding | None":
    """Returns a recorded sharding, on a mesh without devices, or None if `place` has no mesh."""
    if place is None:
        return None
    from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

    kinds = {kind.name.lower(): kind for kind in AxisType}
    try:
        types = tuple(kinds[name] for name in place.get("axis_types") or ["auto"] * len(place["mesh"]))
        mesh = AbstractMesh(tuple(place["mesh"].values()), tuple(place["mesh"]), axis_types=types)
        spec = PartitionSpec(*(tuple(a) if isinstance(a, list) else a for a in place["spec"]))
        return NamedSharding(mesh, spec)
    except Exception:  # The file may contain anything, and JAX raises many kinds of errors for it.
        return None


class LazyPart:
    """A box of an array that is still in its checkpoint."""

    def __init__(self, reader: Source, entry: ArrayEntry, box: Box):
        self._reader, self._entry, self._box = reader, entry, box

    def part(self, box: Box) -> "LazyPart":
        """Returns a box within this box. Its bounds count from the start of this box."""
        inner = tuple((first + a, first + b) for (first, _), (a, b) in zip(self._box, box, strict=True))
        return LazyPart(self._reader, self._entry, inner)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "np.ndarray[Any, Any]":
        import numpy as np

        (array,) = self._reader.read([(self._entry, self._box)])
        # `ascontiguousarray` gives an array without axes one axis, so the shape is set again.
        return np.ascontiguousarray(array, dtype).reshape(array.shape)


def _bounds(index: Any, shape: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], tuple[Any, ...]]:
    """Returns the box that a basic index needs, and the index of the result within that box."""
    parts = list(index) if isinstance(index, tuple) else [index]
    dots = [n for n, part in enumerate(parts) if part is ...]  # An array as an index would not compare as one value.
    if len(dots) > 1 or len(parts) - len(dots) > len(shape):
        raise IndexError(f"{index!r} does not fit an array of shape {list(shape)}")
    at = dots[0] if dots else len(parts)
    parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + len(dots))
    box: list[tuple[int, int]] = []
    rest: list[Any] = []
    for axis, (part, size) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, slice):
            positions = range(size)[part]
            if not positions:
                box.append((0, 0))
                rest.append(slice(None))
                continue
            first, last = min(positions[0], positions[-1]), max(positions[0], positions[-1])
            box.append((first, last + 1))
            rest.append(slice(None, None, positions.step))
        elif hasattr(part, "__index__") and not isinstance(part, bool) and not getattr(part, "shape", ()):
            number = operator.index(part)
            if not -size <= number < size:
                raise IndexError(f"index {number} is out of bounds for axis {axis} with size {size}")
            position = number % size
            box.append((position, position + 1))
            rest.append(0)
        else:
            raise TypeError(f"{part!r}: only integers, slices and an ellipsis; read a box first, then index that")
    return tuple(box), tuple(rest)
