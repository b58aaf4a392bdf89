"""Leaves that are made of other leaves when they are read: box by box, so that no more is read than is wanted."""

import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from . import _dtypes
from ._catalogue import ArrayEntry, Entry, ValueEntry
from ._sharding import Box, extent, intersect, slices, whole
from ._tree import Skeleton
from .formats import Problem, Reader

if TYPE_CHECKING:
    import numpy as np


class Plan(NamedTuple):
    """What to read for a box of a leaf, as entries and boxes of the checkpoint, and how the box is made of it."""

    needs: "list[tuple[ArrayEntry, Box]]"
    make: "Callable[[list[np.ndarray]], np.ndarray]"


class Leaf(msgspec.Struct, frozen=True):
    """A leaf of a view: `plan` is None for what is no array, `plain` says that it is the checkpoint's own."""

    entry: Entry
    plan: Callable[[Box], Plan] | None = None
    plain: bool = False

    def at(self, path: str) -> "Leaf":
        """The same leaf under another path."""
        return Leaf(self.entry.at(path), self.plan, self.plain)

    def made(self, plan: Callable[[Box], Plan], **changed: Any) -> "Leaf":
        """A leaf made of this one."""
        entry = self.array
        fields = {
            "path": entry.path,
            "type": entry.type,
            "dtype": entry.dtype,
            "shape": entry.shape,
            "impl": entry.impl,
        }
        return Leaf(ArrayEntry(**{**fields, **changed}), plan)

    @property
    def array(self) -> ArrayEntry:
        assert isinstance(self.entry, ArrayEntry)
        return self.entry

    @property
    def source(self) -> str:
        """The path of the (first) leaf of the checkpoint that this one is made of; its own where none is read."""
        needs = [] if self.plan is None else self.plan_of(whole(self.array.shape)).needs
        return needs[0][0].path if needs else self.entry.path

    def plan_of(self, box: Box) -> Plan:
        assert self.plan is not None
        return self.plan(box)


def leaves_of(entries: Mapping[str, Entry]) -> dict[str, Leaf]:
    """The leaves of a checkpoint as they are, named by the keys of the mapping."""

    def leaf(path: str, entry: Entry) -> Leaf:
        if isinstance(entry, ValueEntry):
            return Leaf(entry.at(path))
        return Leaf(entry.at(path), lambda box: Plan([(entry, box)], lambda arrays: arrays[0]), plain=True)

    return {path: leaf(path, entry) for path, entry in entries.items()}


def transposed(leaf: Leaf, axes: Sequence[int]) -> Leaf:
    """The leaf with its axes in another order, as `numpy.transpose` has it."""

    def plan(box: Box) -> Plan:
        source: list[Any] = [None] * len(box)
        for n, axis in enumerate(axes):
            source[axis] = box[n]
        inner = leaf.plan_of(tuple(source))
        return Plan(inner.needs, lambda arrays: inner.make(arrays).transpose(axes))

    return leaf.made(plan, shape=tuple(leaf.array.shape[axis] for axis in axes))


def reshaped(leaf: Leaf, shape: tuple[int, ...]) -> Leaf:
    """The leaf in another shape of the same size.

    Axes that make up one another are on their own, so that a box along other axes reads no more than itself; of such a
    group, read are the rows between the first and the last wanted element.
    """
    old = leaf.array.shape

    def plan(box: Box) -> Plan:
        if not math.prod(extent(box)):
            return Plan([], lambda arrays: _empty(extent(box), leaf.array.dtype))
        source: list[tuple[int, int]] = []
        sizes, skipped = [], []  # of each group: elements that are read, and those of them before the first wanted one
        groups = _groups(old, shape)
        for before, after in groups:
            first = _flat([start for start, _ in box[after]], shape[after])
            last = _flat([stop - 1 for _, stop in box[after]], shape[after])
            rows = _covering(old[before], first, last)
            source += rows
            sizes.append(math.prod(extent(rows)))
            skipped.append(first - _flat([start for start, _ in rows], old[before]))
        inner = leaf.plan_of(tuple(source))

        def make(arrays: "list[np.ndarray]") -> "np.ndarray":
            import numpy as np

            flat = np.ascontiguousarray(inner.make(arrays)).reshape(-1)
            steps = [math.prod(sizes[n + 1 :]) for n in range(len(sizes))]  # elements from one of a group to the next
            begin = sum(count * step for count, step in zip(skipped, steps, strict=True))
            strides = [
                flat.itemsize * step * math.prod(shape[axis + 1 : after.stop])
                for (_, after), step in zip(groups, steps, strict=True)
                for axis in range(after.start, after.stop)
            ]
            return np.lib.stride_tricks.as_strided(flat[begin:], extent(box), strides)

        return Plan(inner.needs, make)

    return leaf.made(plan, shape=shape)


def cast(leaf: Leaf, dtype: str) -> Leaf:
    """The leaf's values in another dtype."""

    def plan(box: Box) -> Plan:
        inner = leaf.plan_of(box)
        return Plan(inner.needs, lambda arrays: _dtypes.cast(inner.make(arrays), _dtypes.to_numpy(dtype)))

    return leaf.made(plan, dtype=dtype)


def reinterpreted(leaf: Leaf, dtype: str) -> Leaf:
    """The leaf's bytes as another dtype of the same size."""

    def plan(box: Box) -> Plan:
        inner = leaf.plan_of(box)
        return Plan(inner.needs, lambda arrays: inner.make(arrays).view(_dtypes.to_numpy(dtype)))

    return leaf.made(plan, dtype=dtype)


def stacked(leaves: Sequence[Leaf], path: str, axis: int) -> Leaf:
    """Leaves of one shape and dtype side by side along a new axis."""

    def plan(box: Box) -> Plan:
        rest = box[:axis] + box[axis + 1 :]
        inner = [leaf.plan_of(rest) for leaf in leaves[slice(*box[axis])]]

        def make(arrays: "list[np.ndarray]") -> "np.ndarray":
            import numpy as np

            out = _empty(extent(box), leaves[0].array.dtype)
            for n, part in enumerate(_each(inner, arrays)):
                out[(slice(None),) * axis + (n,)] = part
            return np.asarray(out)

        return Plan([need for one in inner for need in one.needs], make)

    shape = leaves[0].array.shape
    kind = {"jax-weak": "jax", "numpy-scalar": "numpy"}.get(leaves[0].array.type, leaves[0].array.type)
    return leaves[0].made(plan, path=path, shape=(*shape[:axis], len(leaves), *shape[axis:]), type=kind)


def joined(leaves: Sequence[Leaf], path: str, axis: int) -> Leaf:
    """Leaves one behind the other along an axis that they have."""
    ends = [0]
    for leaf in leaves:
        ends.append(ends[-1] + leaf.array.shape[axis])
    shape = leaves[0].array.shape
    whole = (*shape[:axis], ends[-1], *shape[axis + 1 :])

    def plan(box: Box) -> Plan:
        parts: list[tuple[Box, Plan]] = []
        for leaf, start, stop in zip(leaves, ends, ends[1:], strict=False):
            common = intersect(box, (*box[:axis], (start, stop), *box[axis + 1 :]))
            if common:
                own = (common[axis][0] - start, common[axis][1] - start)
                parts.append((common, leaf.plan_of((*common[:axis], own, *common[axis + 1 :]))))

        def make(arrays: "list[np.ndarray]") -> "np.ndarray":
            out = _empty(extent(box), leaves[0].array.dtype)
            for (common, _), part in zip(parts, _each([one for _, one in parts], arrays), strict=True):
                out[slices(common, box)] = part
            return out

        return Plan([need for _, one in parts for need in one.needs], make)

    return leaves[0].made(plan, path=path, shape=whole)


def part(leaf: Leaf, path: str, axis: int, start: int, stop: int, *, drop_axis: bool = False) -> Leaf:
    """A range of the leaf along an axis; with `drop_axis` its only position there."""

    def plan(box: Box) -> Plan:
        own = (start, start + 1) if drop_axis else (box[axis][0] + start, box[axis][1] + start)
        inner = leaf.plan_of((*box[:axis], own, *box[axis + (not drop_axis) :]))
        if not drop_axis:
            return inner
        return Plan(inner.needs, lambda arrays: inner.make(arrays).squeeze(axis))

    shape = leaf.array.shape
    middle = () if drop_axis else (stop - start,)
    return leaf.made(plan, path=path, shape=(*shape[:axis], *middle, *shape[axis + 1 :]))


def mapped(leaf: Leaf, function: "Callable[[np.ndarray], np.ndarray]", shape: tuple[int, ...]) -> Leaf:
    """What a function makes of the whole leaf, which is read for every box of it."""
    from .errors import MismatchError

    def plan(box: Box) -> Plan:
        inner = leaf.plan_of(whole(leaf.array.shape))

        def make(arrays: "list[np.ndarray]") -> "np.ndarray":
            import numpy as np

            found = np.asarray(function(inner.make(arrays)))
            expected = _dtypes.to_numpy(leaf.array.dtype)
            if found.shape != shape or found.dtype != expected:
                raise MismatchError(
                    f"{leaf.entry.path}: expected {expected}{list(shape)} from the function of a map rule, found "
                    f"{found.dtype}{list(found.shape)}; pass shape=, and change the dtype by a cast rule"
                )
            return found[(*slices(box, whole(shape)), ...)]  # and not a scalar, where there are no axes

        return Plan(inner.needs, make)

    return leaf.made(plan, shape=shape)


class View:
    """A reader of leaves that are made of another reader's, as `treering.formats.Reader`."""

    identity = ""

    def __init__(
        self, reader: Reader, leaves: Mapping[str, Leaf], skeleton: Skeleton | None = None, *, positional: bool = False
    ):
        self._reader, self.leaves = reader, leaves
        self.positional = positional
        self.untold = reader.untold & leaves.keys() if positional else frozenset[str]()
        self.entries: dict[str, Entry] = {path: leaf.entry for path, leaf in leaves.items()}
        self.format, self.path, self.nbytes = reader.format, reader.path, reader.nbytes
        self.step: int | None = reader.step
        self.metrics: Mapping[str, float] = reader.metrics
        self.metadata: Any = reader.metadata
        self.numbers_are_arrays = reader.numbers_are_arrays
        self.skeleton = skeleton

    @property
    def created(self) -> datetime.datetime | None:
        return self._reader.created

    def source(self, path: str) -> str:
        """Under which path the (first) leaf that a leaf is made of is in what is not a view itself."""
        found = self.leaves[path].source
        return self._reader.source(found) if isinstance(self._reader, View) else found

    def changed(self, leaves: Mapping[str, Leaf], skeleton: Skeleton) -> "View":
        """The same with other leaves, of the same reader, and all that lies beside the tree."""
        view = View(self._reader, leaves, skeleton)
        view.step, view.metrics, view.metadata = self.step, self.metrics, self.metadata
        return view

    def check_present(self) -> None:
        self._reader.check_present()

    def sharding(self, entry: ArrayEntry) -> dict[str, Any] | None:
        leaf = self.leaves[entry.path]
        if not leaf.plain or not isinstance(leaf.entry, ArrayEntry):
            return None
        ((source, _),) = leaf.plan_of(whole(leaf.entry.shape)).needs
        return self._reader.sharding(source)

    def maps(self, wish: bool | None) -> bool:
        plain = all(leaf.plain or leaf.plan is None for leaf in self.leaves.values())
        return plain and self._reader.maps(wish)

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, map: bool | None = None
    ) -> "list[np.ndarray]":
        plans = [self.leaves[entry.path].plan_of(box) for entry, box in wanted]
        found = self._reader.read([need for plan in plans for need in plan.needs], verify=verify, map=map)
        arrays = list(_each(plans, found))
        owners: dict[str, str] = {}  # what a rule has copied is to be two arrays that share nothing
        for n, ((entry, _), plan) in enumerate(zip(wanted, plans, strict=True)):
            if any(owners.setdefault(need.path, entry.path) != entry.path for need, _ in plan.needs):
                arrays[n] = arrays[n].copy()
        return arrays

    def problems(self) -> Iterator[Problem]:
        return self._reader.problems()


def _each(plans: Sequence[Plan], arrays: "list[np.ndarray]") -> "Iterator[np.ndarray]":
    """What each plan makes of its part of what was read for all of them."""
    rest = iter(arrays)
    for plan in plans:
        yield plan.make([next(rest) for _ in plan.needs])


def _empty(shape: tuple[int, ...], dtype: str) -> "np.ndarray":
    import numpy as np

    return np.empty(shape, _dtypes.to_numpy(dtype))


def _flat(position: Sequence[int], shape: Sequence[int]) -> int:
    """The number of elements, in C order, before a position."""
    found = 0
    for index, size in zip(position, shape, strict=True):
        found = found * size + index
    return found


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """The axes of two shapes of one size, not 0, in the smallest groups that are of one size in both."""
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
    """The smallest box whose elements lie side by side in C order and hold those from `first` to `last`."""
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
