"""Makes a live pytree a source: its leaves by path, and the bytes of its arrays box by box.

A loop that saves one structure many times describes it only once: `describe_cached` remembers descriptions.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._core import dtypes
from .._core.boxes import Box, box_shape, intersect, slices
from .._core.entries import ArrayEntry, Entry, ValueEntry
from .._core.lazy import LazyPart
from .._core.skeleton import Skeleton
from .._core.source import EVERYTHING, Problem, Share
from ..errors import UnsupportedError
from . import devices
from .leaves import Catalogue, Described, LocalShard, describe_leaves, host_bytes, leaf_kind, local_parts, value_entry
from .staged_supply import StagedSupply

_MAX_KNOWN = 4  # descriptions that are remembered, as many as `walk` remembers structures


class LiveTree:
    """A live pytree as a `treering.formats.Source`. Only the shards of this process can be read.

    Arrays are read from where they are. So the caller has to wait until all is read, or runs `stage()` first.
    """

    format = "live"
    nbytes, step, metadata, created = 0, None, None, None
    positional = False
    numbers_are_arrays = False
    records_kinds = True
    ambiguous_dtypes: frozenset[str] = frozenset()
    identity = ""

    def __init__(self, path: str, skeleton: Skeleton, described: Described):
        self.path, self.skeleton, self.described = path, skeleton, described
        catalogue, shards, _ = described
        self.metrics: Mapping[str, float] = {}
        self.entries: Mapping[str, Entry] = {entry.path: entry for entry in catalogue.entries}
        self.catalogue, self.shards = catalogue, shards
        self.static, self.flax_boxes = catalogue.static, catalogue.boxes
        self._staging: StagedSupply | None = None
        self._leaf = {entry.path: n for n, entry in enumerate(catalogue.entries)}
        self._leaf.update({catalogue.entries[n].path: first for n, first in catalogue.tied.items()})
        self._by_leaf: dict[int, list[int]] = {}
        for n, shard in enumerate(shards):
            self._by_leaf.setdefault(shard.leaf, []).append(n)

    def stage(self) -> StagedSupply:
        """Returns the staging, which the caller runs. After that the tree is read from the copies, and may change."""
        self._staging = StagedSupply(self.shards, self.described.data, None)
        return self._staging

    def shards_of(self, path: str) -> list[LocalShard]:
        """Returns the shards of an array that this process has."""
        return [self.shards[n] for n in self._by_leaf.get(self._leaf[path], ())]

    def sharding_of(self, path: str) -> jax.sharding.Sharding | None:
        """Returns the sharding of an array that is spread over devices, or None for one on a device of this process."""
        return self.catalogue.shardings.get(self._leaf[path])

    def is_global(self, path: str) -> bool:
        """Returns True if this process has only a part of an array, or nothing of it."""
        return self._leaf[path] in self.catalogue.global_leaves

    def check_present(self) -> None: ...

    def sharding(self, entry: ArrayEntry) -> Mapping[str, Any] | None:
        return self.catalogue.places[self._leaf[entry.path]]

    def origin(self, path: str) -> str:
        """Returns the path of the first leaf that is the same array object as a leaf."""
        return self.catalogue.entries[self._leaf[path]].path

    def can_mmap(self, requested: bool | None) -> bool:
        return True

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, mmap: bool | None = None
    ) -> list[np.ndarray]:
        numbers = [self._shard_of(entry, box) for entry, box in wanted]
        arrays = self._read_shards([n for n in numbers if n is not None])
        return [
            next(arrays) if n is not None else self._assemble(entry, box)
            for n, (entry, box) in zip(numbers, wanted, strict=True)
        ]

    def problems(self, share: Share = EVERYTHING) -> Iterator[Problem]:
        return iter(())

    def _shard_of(self, entry: ArrayEntry, box: Box) -> int | None:
        """Returns the number of the shard that is a box of an array; None if none is, or it has no elements."""
        for n in self._by_leaf.get(self._leaf[entry.path], ()):
            shard = self.shards[n]
            if shard.box == box:
                return n if shard.nbytes else None
        return None

    def _read_shards(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """Yields shards. Staged ones are taken together, because there may be thousands of small ones."""
        if self._staging is None:
            yield from (self._part(n, self.shards[n].box) for n in numbers)
            return
        begin = 0
        while begin < len(numbers):
            taken = self._staging.take_arrays(numbers[begin:])
            yield from taken
            begin += len(taken)

    def _assemble(self, entry: ArrayEntry, box: Box) -> np.ndarray:
        """Returns a box of an array, made of the shards that have parts of it."""
        out = np.empty(box_shape(box), dtypes.to_numpy(entry.dtype))
        for n in self._by_leaf.get(self._leaf[entry.path], ()):
            common = intersect(self.shards[n].box, box) if box else ()
            if common is not None and out.size:
                part = self._part(n, common)
                if common == box:
                    return part
                out[slices(common, box)] = part
        return out

    def _part(self, n: int, box: Box) -> np.ndarray:
        """Returns the part of shard `n` that is in a box, copied only if necessary."""
        shard, data = self.shards[n], self.described.data[n]
        if self._staging is not None:
            return _within(self._staging.take_arrays([n])[0], box, shard.box)
        if not shard.needs_copy:
            return _within(np.asarray(data), box, shard.box)
        # Only the wanted box is copied from the device, or read from the checkpoint.
        if box != shard.box and isinstance(data, jax.Array | LazyPart):
            inner = tuple((a - first, b - first) for (a, b), (first, _) in zip(box, shard.box, strict=True))
            part = np.asarray(data.part(inner)) if isinstance(data, LazyPart) else devices.slice_on_device(data, inner)
        else:
            part = _within(devices.fetch(data), box, shard.box)
        return host_bytes(shard, data, part).view(shard.dtype).reshape(box_shape(box))


def _within(array: np.ndarray, box: Box, outer: Box) -> np.ndarray:
    """Returns the part of an array that is in `box`. The array itself is the box `outer`."""
    return array if box == outer else array[slices(box, outer)]


class _CachedTree(NamedTuple):
    """A description without the arrays, and all properties of the leaves that it depends on.

    values: the leaves that are plain values. Their entries are made again each time. All other leaves are JAX arrays.
    order: the leaf of each shard, or None if the shards are the leaves in order.
    separate: the numbers of the shards that are held by a part of their leaf, by leaf and box.
    """

    paths: Sequence[str]
    options: tuple[Any, ...]
    types: list[type]
    avals: list[Any]
    shardings: list[Any]
    committed: list[bool]
    values: list[int]
    order: list[int] | None
    separate: Mapping[int, Mapping[Box, int]]
    catalogue: Catalogue
    shards: tuple[LocalShard, ...]


_cache: tuple[_CachedTree, ...] = ()  # the last used first; always replaced and never changed, so threads need no lock


def describe_cached(
    paths: Sequence[str],
    leaves: Sequence[Any],
    *,
    dtype: Any = None,
    detach: bool = False,
    single_process: bool = True,
    collective: bool = False,
) -> Described:
    """Returns the description that `leaves.describe_leaves` would return, faster if the same structure was described
    before.

    paths: one object for each structure, as `walk` returns it.

    The options are those of `leaves.describe_leaves`.
    """
    global _cache
    # The dtype is compared as text, because NumPy says that the dtype float64 is equal to None.
    options = (
        None if dtype is None else dtypes.to_text(dtypes.requested_dtype(dtype)),
        detach,
        single_process,
        collective,
    )
    known = next((one for one in _cache if one.paths is paths and one.options == options), None)
    found = None if known is None else _reuse(known, leaves)
    if found is None:
        found = describe_leaves(
            paths, leaves, dtype=dtype, detach=detach, single_process=single_process, collective=collective
        )
        known = _remember(paths, options, leaves, found)
    if known is not None and (not _cache or _cache[0] is not known):
        others = [one for one in _cache if one.paths is not paths or one.options != options]
        _cache = (known, *others[: _MAX_KNOWN - 1])
    return found


def _reuse(known: _CachedTree, leaves: Sequence[Any]) -> Described | None:
    """Returns the description of leaves that are like those of the last time, or None if one of them is not."""
    if list(map(type, leaves)) != known.types:
        return None
    arrays = _arrays(leaves, known.values)
    if [array.aval for array in arrays] != known.avals or [array.sharding for array in arrays] != known.shardings:
        return None
    if [array.committed for array in arrays] != known.committed:
        return None
    catalogue, tied = known.catalogue, known.catalogue.tied
    if any(leaves[n] is not leaves[first] for n, first in tied.items()):
        return None
    if len(set(map(id, arrays))) != len(arrays) - len(tied) or True in [array.is_deleted() for array in arrays]:
        return None
    if known.values:
        entries = list(catalogue.entries)
        try:
            for n in known.values:
                entries[n] = value_entry(entries[n].path, leaves[n])
        except UnsupportedError:  # `describe_leaves` raises one error for all leaves that cannot be saved.
            return None
        catalogue = catalogue._replace(entries=entries)
    data = list(leaves) if known.order is None else [leaves[n] for n in known.order]
    for leaf, numbers in known.separate.items():
        for box, part in local_parts(leaves[leaf]):
            if part.is_deleted():
                return None
            data[numbers[box]] = part
    return Described(catalogue, known.shards, data)


def _remember(
    paths: Sequence[str], options: tuple[Any, ...], leaves: Sequence[Any], found: Described
) -> _CachedTree | None:
    """Returns a description to remember, or None if a leaf is neither a plain value nor a JAX array."""
    kinds = [leaf_kind(type(leaf)) for leaf in leaves]
    if set(kinds) - {"jax", "key", "value"}:
        return None
    values = [n for n, kind in enumerate(kinds) if kind == "value"]
    arrays = _arrays(leaves, values)
    separate: dict[int, dict[Box, int]] = {}
    for n, (shard, one) in enumerate(zip(found.shards, found.data, strict=True)):
        if leaves[shard.leaf] is not one:
            separate.setdefault(shard.leaf, {})[shard.box] = n
    order = [shard.leaf for shard in found.shards]
    return _CachedTree(
        paths,
        options,
        list(map(type, leaves)),
        [array.aval for array in arrays],
        [array.sharding for array in arrays],
        [array.committed for array in arrays],
        values,
        None if order == list(range(len(leaves))) else order,
        separate,
        found.catalogue._replace(entries=_without_values(found.catalogue.entries, values)),
        found.shards,
    )


def _without_values(entries: Sequence[Entry], values: Sequence[int]) -> Sequence[Entry]:
    """Returns the entries, with only the paths of plain values. These values may be large, and change the next time."""
    if not values:
        return entries
    bare = list(entries)
    for n in values:
        bare[n] = ValueEntry(entries[n].path, "none")
    return bare


def _arrays(leaves: Sequence[Any], values: Sequence[int]) -> Sequence[Any]:
    """Returns the leaves that are not plain values."""
    if not values:
        return leaves
    skipped = set(values)
    return [leaf for n, leaf in enumerate(leaves) if n not in skipped]
