"""Makes leaves of other leaves when they are read, box by box, so that no more is read than is wanted."""

import datetime
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..errors import MismatchError
from . import casts, dtypes
from .boxes import Box, box_shape, full_box, intersect, slices
from .entries import ArrayEntry, Entry, StatesEntry, ValueEntry
from .leaf_paths import relative_to
from .skeleton import Skeleton
from .source import (
    EVERYTHING,
    Boxes,
    Problem,
    Share,
    Source,
    expands,
    flax_boxes,
    left_out,
    model_config,
    pieces,
    records_kinds,
    static_values,
)

if TYPE_CHECKING:
    import numpy as np

_BATCH_BYTES = 64 << 20  # of arrays in memory at a time that others are made of, unless a single one needs more


class ReadPlan(NamedTuple):
    """The entries and boxes of the checkpoint to read for a box of a leaf, and the function that makes that box."""

    needs: "list[tuple[Any, Box]]"
    make: "Callable[[list[np.ndarray]], np.ndarray]"


class Leaf(msgspec.Struct, frozen=True):
    """A leaf of a view.

    plan: plans how to read a box; None for a leaf that is not an array.
    plain: True for a leaf of the checkpoint without changes.
    source: the path of the (first) leaf of the checkpoint that this one is made of.
    in_place: True if each element is made of the element at the same position.
    """

    entry: Entry
    plan: Callable[[Box], ReadPlan] | None = None
    plain: bool = False
    source: str = ""
    in_place: bool = False

    def at(self, path: str) -> "Leaf":
        """Returns this leaf under another path."""
        return Leaf(self.entry.at(path), self.plan, self.plain, self.source, self.in_place)

    def made(self, plan: Callable[[Box], ReadPlan], *, in_place: bool = False, **changed: Any) -> "Leaf":
        """Returns a leaf that is made of this one, with some fields of its entry changed."""
        entry = self.array
        fields = {
            "path": entry.path,
            "type": entry.type,
            "dtype": entry.dtype,
            "shape": entry.shape,
            "impl": entry.impl,
        }
        made = ArrayEntry(**{**fields, **changed})
        if made.type == "numpy-scalar" and made.shape:
            made = ArrayEntry(made.path, "numpy", made.dtype, made.shape)
        return Leaf(made, plan, source=self.source, in_place=in_place and (self.plain or self.in_place))

    @property
    def array(self) -> ArrayEntry:
        assert isinstance(self.entry, ArrayEntry)
        return self.entry

    def plan_of(self, box: Box) -> ReadPlan:
        assert self.plan is not None
        return self.plan(box)


class _Plain(msgspec.Struct, frozen=True, gc=False):
    """The plan of an array of the checkpoint. The garbage collector need not visit it, unlike a closure."""

    entry: Any

    def __call__(self, box: Box) -> ReadPlan:
        return ReadPlan([(self.entry, box)], operator.itemgetter(0))


def plain_leaves(entries: Mapping[str, Entry]) -> dict[str, Leaf]:
    """Returns the leaves of a checkpoint without changes, named by the keys of the mapping."""

    def leaf(path: str, entry: Entry) -> Leaf:
        own = entry if entry.path == path else entry.at(path)
        if isinstance(entry, ValueEntry) and not isinstance(entry, StatesEntry):
            return Leaf(own, source=entry.path)
        return Leaf(own, _Plain(entry), plain=True, source=entry.path)

    return {path: leaf(path, entry) for path, entry in entries.items()}


def transposed(leaf: Leaf, axes: Sequence[int]) -> Leaf:
    """Returns the leaf with its axes in another order, like `numpy.transpose`."""

    def plan(box: Box) -> ReadPlan:
        source: list[Any] = [None] * len(box)
        for n, axis in enumerate(axes):
            source[axis] = box[n]
        inner = leaf.plan_of(tuple(source))
        return ReadPlan(inner.needs, lambda arrays: inner.make(arrays).transpose(axes))

    return leaf.made(plan, shape=tuple(leaf.array.shape[axis] for axis in axes))


def cast(leaf: Leaf, dtype: str) -> Leaf:
    """Returns the leaf with its values in another dtype. Planning to read text as numbers raises `MismatchError`."""
    new = dtypes.to_numpy(dtype)
    is_text = dtypes.to_numpy(leaf.array.dtype).kind in "SU" and new.kind not in "SU"

    def plan(box: Box) -> ReadPlan:
        if is_text:  # Only now, because a template may leave it out.
            raise MismatchError(
                f"{leaf.entry.path}: expected numbers to cast to {dtype}, found {leaf.array.dtype}, which is text; "
                "choose a narrower pattern"
            )
        inner = leaf.plan_of(box)
        return ReadPlan(inner.needs, lambda arrays: casts.cast(inner.make(arrays), new, leaf.entry.path))

    return leaf.made(plan, in_place=True, dtype=dtype)


def multiplied(leaf: Leaf, factor: float, divisor: float) -> Leaf:
    """Returns the leaf times a factor and over a divisor, computed in float64 and rounded to the leaf's dtype.

    Reading it raises `MismatchError` if a product is beyond the range of the dtype.
    """
    path, dtype = leaf.entry.path, dtypes.to_numpy(leaf.array.dtype)

    def plan(box: Box) -> ReadPlan:
        inner = leaf.plan_of(box)

        def make(arrays: "list[np.ndarray]") -> "np.ndarray":
            import numpy as np

            array = dtypes.convert(inner.make(arrays), np.dtype(np.float64))
            product = dtypes.convert(array * factor / divisor, dtype)
            if not (np.isfinite(product) == np.isfinite(array)).all():
                raise MismatchError(
                    f"{path}: times {factor / divisor} it is beyond the range of {dtype}; cast it by a rule before"
                )
            return product

        return ReadPlan(inner.needs, make)

    return leaf.made(plan, in_place=True)


def reinterpreted(leaf: Leaf, dtype: str) -> Leaf:
    """Returns the leaf with its bytes as another dtype of the same size."""

    def plan(box: Box) -> ReadPlan:
        inner = leaf.plan_of(box)
        return ReadPlan(inner.needs, lambda arrays: inner.make(arrays).view(dtypes.to_numpy(dtype)))

    return leaf.made(plan, dtype=dtype)


def wrapped(leaf: Leaf, impl: str) -> Leaf:
    """Returns the leaf's uint32 data as typed keys of an implementation, which have one axis less."""
    return leaf.made(leaf.plan_of, type="key", impl=impl)


def part(leaf: Leaf, path: str, axis: int, start: int, stop: int, *, drop_axis: bool = False) -> Leaf:
    """Returns a range of the leaf along an axis. With `drop_axis` it is the position `start`, without the axis."""

    def plan(box: Box) -> ReadPlan:
        own = (start, start + 1) if drop_axis else (box[axis][0] + start, box[axis][1] + start)
        inner = leaf.plan_of((*box[:axis], own, *box[axis + (not drop_axis) :]))
        if not drop_axis:
            return inner
        return ReadPlan(inner.needs, lambda arrays: inner.make(arrays).squeeze(axis))

    shape = leaf.array.shape
    middle = () if drop_axis else (stop - start,)
    return leaf.made(plan, path=path, shape=(*shape[:axis], *middle, *shape[axis + 1 :]))


def tiled(leaf: Leaf, repeats: Sequence[int]) -> Leaf:
    """Returns the leaf repeated along each axis. If a box crosses the end of a repetition, all of that axis is read."""
    old = leaf.array.shape

    def plan(box: Box) -> ReadPlan:
        source: list[tuple[int, int]] = []
        for (start, stop), size in zip(box, old, strict=True):
            begin = start - start % size if size else 0
            source.append((start - begin, stop - begin) if stop - begin <= size else (0, size))
        inner = leaf.plan_of(tuple(source))

        def make(arrays: "list[np.ndarray]") -> "np.ndarray":
            import numpy as np

            array = inner.make(arrays)
            for axis, ((start, stop), size) in enumerate(zip(box, old, strict=True)):
                if start // max(size, 1) != (stop - 1) // max(size, 1):
                    array = array.take(np.arange(start, stop) % max(size, 1), axis)
            return array

        return ReadPlan(inner.needs, make)

    return leaf.made(plan, shape=tuple(size * count for size, count in zip(old, repeats, strict=True)))


def padded(leaf: Leaf, widths: Sequence[tuple[int, int]], value: "np.ndarray") -> Leaf:
    """Returns the leaf with a value before and after it along each axis. `widths` has the numbers of these elements."""
    old = leaf.array.shape
    inside = tuple((before, before + size) for (before, _), size in zip(widths, old, strict=True))

    def plan(box: Box) -> ReadPlan:
        common = intersect(box, inside)
        if common is None:
            inner = ReadPlan([], lambda arrays: empty((0,), leaf.array.dtype))
        else:
            inner = leaf.plan_of(tuple((a - o, b - o) for (a, b), (o, _) in zip(common, inside, strict=True)))
        if common == box:
            return inner

        def make(arrays: "list[np.ndarray]") -> "np.ndarray":
            out = empty(box_shape(box), leaf.array.dtype)
            out[...] = value
            if common is not None:
                out[slices(common, box)] = inner.make(arrays)
            return out

        return ReadPlan(inner.needs, make)

    shape = tuple(before + size + after for (before, after), size in zip(widths, old, strict=True))
    return leaf.made(plan, shape=shape)


class View:
    """A `treering.formats.Source` whose leaves are made of those of another source."""

    def __init__(
        self, reader: Source, leaves: Mapping[str, Leaf], skeleton: Skeleton | None = None, *, positional: bool = False
    ):
        self._reader, self.leaves = reader, leaves
        self.positional = positional
        self.ambiguous_dtypes = (
            frozenset(path for path, leaf in leaves.items() if leaf.plain and leaf.source in reader.ambiguous_dtypes)
            if reader.ambiguous_dtypes
            else frozenset[str]()
        )
        self.entries: dict[str, Entry] = {path: leaf.entry for path, leaf in leaves.items()}
        self.format, self.path, self.nbytes = reader.format, reader.path, reader.nbytes
        self.identity = reader.identity
        self.step: int | None = reader.step
        self._metrics: Mapping[str, float] | None = None  # None: those of the reader, which may read them late
        self.metadata: Any = reader.metadata
        self.numbers_are_arrays = reader.numbers_are_arrays
        self.expands = expands(reader)
        self.records_kinds, self.static = records_kinds(reader), static_values(reader)
        self.left_out = left_out(reader)
        self.skeleton = skeleton
        self.guessed: tuple[str, ...] = ()  # containers whose order is only inferred from the names in them

    @property
    def created(self) -> datetime.datetime | None:
        return self._reader.created

    @functools.cached_property
    def flax_boxes(self) -> Boxes:
        """The boxes of Flax, at the paths to which rules have moved their contents."""
        boxes = flax_boxes(self._reader)
        return moved_boxes(boxes, {path: leaf.source for path, leaf in self.leaves.items()}) if boxes else boxes

    @property
    def metrics(self) -> Mapping[str, float]:
        return self._reader.metrics if self._metrics is None else self._metrics

    @metrics.setter
    def metrics(self, numbers: Mapping[str, float]) -> None:
        self._metrics = numbers

    def source(self, path: str) -> str:
        """Returns the path, in the source below all views, of the (first) leaf that a leaf is made of."""
        found = self.leaves[path].source
        return self._reader.source(found) if isinstance(self._reader, View) else found

    def is_elementwise(self, path: str) -> bool:
        """Returns True if each element is made of the one at the same position, in the source below all views."""
        leaf = self.leaves[path]
        below = not isinstance(self._reader, View) or self._reader.is_elementwise(leaf.source)
        return below and (leaf.plain or leaf.in_place)

    def origins(self, path: str) -> "list[tuple[ArrayEntry, Box]]":
        """Returns the entries and boxes that an array is made of, in the source below all views."""
        needs = self.leaves[path].plan_of(full_box(self.leaves[path].array.shape)).needs
        if not isinstance(self._reader, View):
            return needs
        return [origin for entry, _ in needs for origin in self._reader.origins(entry.path)]

    def changed(self, leaves: Mapping[str, Leaf], skeleton: Skeleton | None) -> "View":
        """Returns this view with other leaves of the same source. Step, metrics and metadata stay."""
        view = View(self._reader, leaves, skeleton)
        view.step, view._metrics, view.metadata, view.guessed = self.step, self._metrics, self.metadata, self.guessed
        return view

    def check_present(self) -> None:
        self._reader.check_present()

    def model_config(self) -> Mapping[str, Any]:
        """Returns what is known of quantized weights; see `source.model_config`."""
        return model_config(self._reader)

    def sharding(self, entry: ArrayEntry) -> Mapping[str, Any] | None:
        leaf = self.leaves[entry.path]
        if leaf.plan is None or not (leaf.plain or leaf.in_place):
            return None
        ((source, _),) = leaf.plan_of(full_box(leaf.array.shape)).needs
        return self._reader.sharding(source)

    @property
    def is_local(self) -> bool | None:
        """True if all files are on disks of this host; None if the source does not know."""
        return getattr(self._reader, "is_local", None)

    def can_mmap(self, requested: bool | None) -> bool:
        plain = all(leaf.plain or leaf.plan is None for leaf in self.leaves.values())
        return plain and self._reader.can_mmap(requested)

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, mmap: bool | None = None
    ) -> "list[np.ndarray]":
        leaves = [self.leaves[entry.path] for entry, _ in wanted]
        if False not in [leaf.plain for leaf in leaves] and len({leaf.source for leaf in leaves}) == len(leaves):
            entries: Mapping[str, Any] = self._reader.entries
            plain = [(entries[leaf.source], box) for leaf, (_, box) in zip(leaves, wanted, strict=True)]
            return self._reader.read(plain, verify=verify, mmap=mmap)
        plans = [leaf.plan_of(box) for leaf, (_, box) in zip(leaves, wanted, strict=True)]
        arrays, lost = list["np.ndarray"](), list[MismatchError]()
        for batch in self._batches(wanted, plans):
            rest = iter(self._reader.read([need for plan in batch for need in plan.needs], verify=verify, mmap=mmap))
            for plan in batch:
                parts = [next(rest) for _ in plan.needs]
                try:
                    arrays.append(plan.make(parts))
                except MismatchError as error:
                    lost.append(error)
        if lost:
            casts.refuse(lost)
        owners: dict[str, str] = {}  # If a rule has copied a leaf, the two arrays must not share memory.
        for n, ((entry, _), plan) in enumerate(zip(wanted, plans, strict=True)):
            if any(owners.setdefault(need.path, entry.path) != entry.path for need, _ in plan.needs):
                arrays[n] = arrays[n].copy()
        return arrays

    def _batches(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], plans: Sequence[ReadPlan]
    ) -> Iterator[Sequence[ReadPlan]]:
        """Yields plans whose arrays are read together: what other arrays are made of takes memory until then."""
        begin = nbytes = 0
        for n, ((entry, _), plan) in enumerate(zip(wanted, plans, strict=True)):
            if not self.leaves[entry.path].plain:
                own = sum(math.prod(box_shape(box)) * dtypes.itemsize(need.dtype) for need, box in plan.needs)
                if n > begin and nbytes + own > _BATCH_BYTES:
                    yield plans[begin:n]
                    begin, nbytes = n, 0
                nbytes += own
        yield plans[begin:]

    def pieces(self, entry: ArrayEntry, box: Box) -> list[tuple[int, Box]]:
        """Returns the pieces of an array; see `source.pieces`. An array made of other leaves counts as one piece."""
        leaf = self.leaves[entry.path]
        if leaf.plan is None or not (leaf.plain or leaf.in_place):
            return [(0, full_box(entry.shape))]
        ((below, _),) = leaf.plan_of(full_box(entry.shape)).needs
        return pieces(self._reader, below, box)

    def problems(self, share: Share = EVERYTHING) -> Iterator[Problem]:
        return self._reader.problems(share)


def moved_boxes(boxes: Boxes, sources: Mapping[str, str]) -> Boxes:
    """Returns boxes at the paths of leaves that were at the paths `sources` before.

    The box of a container moves if all leaves in it move together.
    """
    if not boxes or all(path == source for path, source in sources.items()):
        return boxes
    found: dict[str, Sequence[tuple[str, str]]] = {}
    for path, source in sources.items():
        if levels := boxes.get(source):
            found[path] = levels
        here, below = path, source
        while below and here and here.rpartition("/")[2] == below.rpartition("/")[2]:
            here, below = here.rpartition("/")[0], below.rpartition("/")[0]
            if below in boxes and here not in found and _moved_together(here, below, sources):
                found[here] = boxes[below]
    return found


def _moved_together(path: str, source: str, sources: Mapping[str, str]) -> bool:
    inside = {one: relative for one in sources if (relative := relative_to(one, path)) is not None}
    return all(relative_to(sources[one], source) == relative for one, relative in inside.items())


def make_all(plans: Sequence[ReadPlan], arrays: "list[np.ndarray]") -> "Iterator[np.ndarray]":
    """Yields the result of each plan, made of its share of the arrays that were read for all plans."""
    rest = iter(arrays)
    for plan in plans:
        yield plan.make([next(rest) for _ in plan.needs])


def empty(shape: tuple[int, ...], dtype: str) -> "np.ndarray":
    import numpy as np

    return np.empty(shape, dtypes.to_numpy(dtype))
