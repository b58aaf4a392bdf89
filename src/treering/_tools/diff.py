"""Compares two trees, each a checkpoint or a live tree."""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from .._core import dtypes, expansion, iterator_states, printing
from .._core.boxes import Box, full_box, slice_boxes, slices
from .._core.describe import describe_entry, shorten
from .._core.entries import ArrayEntry, Entry, StatesEntry, ValueEntry
from .._core.lazy import LazyArray, read_ahead
from .._core.source import complete_arrays
from .._core.tracebacks import hide_internal_frames
from .._core.units import count
from .._printable import safe
from .._pytree import devices, flax, leaves, variable_levels, walk
from .._restore.checkpoint import Checkpoint
from .._run.open import open_checkpoint
from .._save.source import inline_checkpoints
from .._threads.python_gc import gc_paused

_SLICE_BYTES = 64 << 20  # An array is compared in slices of about this many bytes, to bound the memory.


@dataclasses.dataclass(frozen=True)
class ValueChange:
    """The difference of two arrays of one shape and dtype.

    `differing` of `size` values differ in their bits. `largest` is the largest difference of two finite values; None if
    no two finite values differ. `relative` is `largest` divided by the largest magnitude. `cosine` is the cosine of the
    angle between the two arrays; None for integers, and if one of them is zero or not finite. All three are None for
    arrays that are not numeric.
    """

    differing: int
    size: int
    largest: float | None = None
    relative: float | None = None
    cosine: float | None = None

    def __str__(self) -> str:
        most = "" if self.largest is None else f", at most by {self.largest:.3g}"
        return f"{self.differing} of {self.size} values differ{most}"


@dataclasses.dataclass(frozen=True, repr=False)
class Diff:
    """The differences of two trees: paths that only one side has, and what differs at common paths.

    It is true if there is any difference. Print it to read them. `values` has numbers about the leaves in `changed`
    that are arrays of one shape and dtype.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: dict[str, str]
    equal: int
    values: dict[str, ValueChange] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.only_a or self.only_b or self.changed)

    def _repr_html_(self) -> str:
        parts = (("only in a", dict.fromkeys(self.only_a, "")), ("only in b", dict.fromkeys(self.only_b, "")))
        found = [
            printing.listed(f"{len(p):,} {title}", list(p.items())) for title, p in (*parts, ("changed", self.changed))
        ]
        return printing.page("Diff", printing.line(f"{count(self.equal, 'leaf is', 'leaves are')} equal"), *found)

    def __repr__(self) -> str:
        counts = f"{len(self.only_a)} only in a, {len(self.only_b)} only in b, {len(self.changed)} changed"
        return f"<Diff {self.equal} equal, {counts}>"

    def __str__(self) -> str:
        lines = [f"{count(self.equal, 'leaf is', 'leaves are')} equal"]
        lines += [f"  - {safe(path)}" for path in self.only_a]
        lines += [f"  + {safe(path)}" for path in self.only_b]
        lines += [f"  ~ {safe(path)}: {safe(what)}" for path, what in self.changed.items()]
        return "\n".join(lines)


@hide_internal_frames
@devices.allow_transfers()
def diff(a: Any, b: Any) -> Diff:
    """Compares two trees leaf by leaf and bit by bit. Each is a path, a `Checkpoint` or a live pytree.

    >>> print(tr.diff("runs/gpt/step-00001000", state))

    Arrays are read and compared in slices. Arrays of JAX and NumPy with the same values are equal.
    """
    (left, in_left), (right, in_right) = _leaves_of(a), _leaves_of(b)
    left, right = _without_boxes(left, right, in_right), _without_boxes(right, left, in_left)
    changed: dict[str, str] = {}
    values: dict[str, ValueChange] = {}
    equal = 0
    common = [path for path in left if path in right]
    alike = {path for path in common if _are_alike(left[path][0], right[path][0])}
    ahead = (read_ahead([side[path][1] if path in alike else None for path in common]) for side in (left, right))
    for path, x, y in zip(common, *ahead, strict=True):
        (a, own_x), (b, own_y) = left[path], right[path]
        what = _compare_leaves(a, own_x if x is None else x, b, own_y if y is None else y)
        if isinstance(what, ValueChange):
            values[path] = what
        if what:
            changed[path] = str(what)
        else:
            equal += 1
    only_a = tuple(path for path in left if path not in right)
    return Diff(only_a, tuple(path for path in right if path not in left), changed, equal, values)


_Side = Mapping[str, tuple[Entry, Any]]  # The entry and contents of every leaf by path.


def _without_boxes(side: _Side, other: _Side, boxes: variable_levels.Boxes) -> _Side:
    """Removes from the paths of a side the levels that its library added for the boxed variables of the other side.

    boxes: the boxed variables of the other side, a live tree.
    """
    found = {there: path for path, there in variable_levels.find_levels(other, boxes, side).items()}
    return {found.get(path, path): leaf for path, leaf in side.items()} if found else side


def _leaves_of(source: Any) -> tuple[_Side, variable_levels.Boxes]:
    """Returns the leaves of a side, and the boxed variables if it is a live tree."""
    if isinstance(source, str | os.PathLike):
        source = open_checkpoint(source)
    if isinstance(source, Checkpoint):
        expansion.check_memory(source._source, complete_arrays(source._source), source.path)
        with gc_paused():
            return {path: (entry, source[path]) for path, entry in source._source.entries.items()}, {}
    flat_tree, _ = inline_checkpoints(walk.flatten_tree(flax.split(source).tree))
    entries = leaves.describe_leaves(flat_tree.paths, flat_tree.leaves)[0].entries
    return {entry.path: (entry, leaf) for entry, leaf in zip(entries, flat_tree.leaves, strict=True)}, flat_tree.boxes


def _compare_leaves(a: Entry, x: Any, b: Entry, y: Any) -> str | ValueChange | None:
    if not (isinstance(a, ArrayEntry) and isinstance(b, ArrayEntry)):
        same = type(a) is type(b) and (a.type, getattr(a, "value", None)) == (b.type, getattr(b, "value", None))
        if isinstance(a, StatesEntry) or isinstance(b, StatesEntry):
            same = a.type == b.type and _are_states_equal(_states(a, x), _states(b, y))
        if not same and isinstance(a, ValueEntry) and isinstance(b, ValueEntry) and a.type == b.type == "iterator":
            return f"iterator{_first_difference(_states(a, x), _states(b, y), '')}"
        return None if same else f"{_leaf_text(a, x)} → {_leaf_text(b, y)}"
    if not _are_alike(a, b):
        return f"{describe_entry(a)} → {describe_entry(b)}"
    # Equal bytes are compared as bytes, and nothing is computed of them unless a part that follows differs.
    difference, equal = _Comparison(), list[Box]()
    for box in slice_boxes(a.shape, dtypes.itemsize(a.dtype), _SLICE_BYTES):
        p, q = _bits(x, box), _bits(y, box)
        if difference.is_empty and (_as_bytes(p) == _as_bytes(q)).all():
            equal.append(box)
            continue
        for earlier in equal:
            same = _bits(x, earlier)
            difference.add(same, same)
        equal.clear()
        difference.add(p, q)
    return difference.change()


def _are_alike(a: Entry, b: Entry) -> bool:
    """Returns True for two arrays of one dtype and shape, whose values can be compared."""
    if not (isinstance(a, ArrayEntry) and isinstance(b, ArrayEntry)):
        return False
    return (a.dtype, a.shape, a.impl) == (b.dtype, b.shape, b.impl)


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of a contiguous array in the largest units that fit."""
    if not array.nbytes:
        return array
    data = array.view(np.uint8)
    return data if array.nbytes % 8 else data.view(np.uint64)


def _states(entry: Entry, leaf: Any) -> Any:
    """Returns the states of an iterator: the leaf of a checkpoint, or decoded from the entry of a live iterator."""
    return leaf if isinstance(leaf, list) or not isinstance(entry, ValueEntry) else entry.decode()


def _first_difference(a: Any, b: Any, where: str) -> str:
    """Describes the first difference of two iterator states and its place in them."""
    if type(a) is type(b) and isinstance(a, dict):
        keys = [key for key in a if key not in b or not _are_states_equal(a[key], b[key])] + [
            key for key in b if key not in a
        ]
        if keys and keys[0] in a and keys[0] in b:
            return _first_difference(a[keys[0]], b[keys[0]], f"{where}[{keys[0]!r}]")
        return f"{where}: keys {shorten([*a])} → {shorten([*b])}"
    if type(a) is type(b) and isinstance(a, list | tuple) and len(a) == len(b):
        for n, (one, other) in enumerate(zip(a, b, strict=True)):
            if not _are_states_equal(one, other):
                return _first_difference(one, other, f"{where}[{n}]")
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and (a.shape, a.dtype) == (b.shape, b.dtype):
        unequal = np.ascontiguousarray(a).view(f"V{a.itemsize}") != np.ascontiguousarray(b).view(f"V{b.itemsize}")
        return f"{where}: {int(unequal.sum())} of {a.size} values differ"
    return f"{where}: {shorten(a)} → {shorten(b)}"


def _are_states_equal(a: Any, b: Any) -> bool:
    """Returns True if two parts of states have the same encoding."""
    parts: tuple[list[Any], list[Any]] = ([], [])
    if iterator_states.encode_state(a, parts[0]) != iterator_states.encode_state(b, parts[1]):
        return False
    return all(memoryview(one) == memoryview(other) for one, other in zip(*parts, strict=True))


class _Comparison:
    """Accumulates the difference of two arrays slice by slice."""

    def __init__(self) -> None:
        self._size = self._differing = 0
        self._largest: float | None = None
        self._magnitude = 0.0
        self._products = self._left = self._right = 0.0
        self._is_numeric = self._is_float = True

    @property
    def is_empty(self) -> bool:
        """True if nothing was added."""
        return not self._size

    def add(self, p: np.ndarray, q: np.ndarray) -> None:
        self._size += p.size
        unequal = p.view(f"V{p.itemsize}") != q.view(f"V{q.itemsize}") if p.size else np.zeros(0, bool)
        self._differing += int(unequal.sum())
        self._is_numeric = p.dtype.kind not in "MmUSb"
        self._is_float = p.dtype.kind not in "biu"  # Counters, keys and masks have no angle.
        if not self._is_numeric:
            return
        with np.errstate(all="ignore"):
            gaps = _distances(p, q)
            p, q = (side.astype(dtypes.compute_dtype(side.dtype)) for side in (p, q))
            a, b = p.view(np.float64), q.view(np.float64)  # A complex number becomes its two parts.
            self._products += float((a * b).sum())
            self._left += float((a * a).sum())
            self._right += float((b * b).sum())
            self._magnitude = max(self._magnitude, *(_finite_max(np.abs(side)) for side in (p, q)))
            both = unequal & np.isfinite(p) & np.isfinite(q)
            if both.any():
                self._largest = max(self._largest or 0.0, float(gaps[both].max()))

    def change(self) -> ValueChange | None:
        if not self._differing:
            return None
        if not self._is_numeric:
            return ValueChange(self._differing, self._size)
        relative = self._largest / self._magnitude if self._magnitude and self._largest is not None else None
        norms = math.sqrt(self._left) * math.sqrt(self._right)
        cosine = self._products / norms if self._is_float and norms and math.isfinite(norms) else None
        return ValueChange(self._differing, self._size, self._largest, relative, cosine)


def _distances(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Returns the absolute differences. They are exact for 64-bit integers, whose differences fit unsigned integers."""
    if p.dtype.kind in "iu":
        return np.maximum(p, q).astype(np.uint64) - np.minimum(p, q).astype(np.uint64)
    p, q = (side.astype(dtypes.compute_dtype(side.dtype)) for side in (p, q))
    return np.abs(p - q)


def _finite_max(values: np.ndarray) -> float:
    return float(np.max(values, initial=0.0, where=np.isfinite(values)))


def _bits(source: Any, box: Box) -> np.ndarray:
    """Returns the values of a box as a contiguous little-endian array of one axis."""
    if isinstance(source, LazyArray):
        array = np.asarray(source.part(box))
    else:
        import jax

        if isinstance(source, jax.Array) and jax.numpy.issubdtype(source.dtype, jax.dtypes.prng_key):
            source = jax.random.key_data(source)
        array = np.asarray(source[slices(box, full_box(source.shape))] if box else source)
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(dtypes.defined_bytes(little)).reshape(-1)


def _leaf_text(entry: Entry, leaf: Any) -> str:
    leaf = leaf.decode() if isinstance(leaf, ValueEntry) else leaf
    return describe_entry(entry) if isinstance(entry, ArrayEntry) else f"{entry.type} {leaf!r:.40}"
