"""Makes a live pytree a source: its leaves by path, and the bytes of its arrays box by box."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._core import dtypes
from .._core.boxes import Box, box_shape, intersect, slices
from .._core.entries import ArrayEntry, Entry
from .._core.lazy import LazyPart
from .._core.skeleton import Skeleton
from .._core.source import EVERYTHING, Problem, Share
from . import devices
from .leaves import Described, LocalShard, host_bytes
from .staged_supply import StagedSupply


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
        self._leaf = {entry.path: catalogue.tied.get(n, n) for n, entry in enumerate(catalogue.entries)}
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
        return [self._read(entry, box) for entry, box in wanted]

    def problems(self, share: Share = EVERYTHING) -> Iterator[Problem]:
        return iter(())

    def _read(self, entry: ArrayEntry, box: Box) -> np.ndarray:
        shape, own = box_shape(box), self._by_leaf.get(self._leaf[entry.path], ())
        if 0 not in shape and (one := next((n for n in own if self.shards[n].box == box), None)) is not None:
            return self._part(one, box)
        out = np.empty(shape, dtypes.to_numpy(entry.dtype))
        for n in own:
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
            (staged,) = self._staging.take([n])
            return _within(staged.view(shard.dtype).reshape(box_shape(shard.box)), box, shard.box)
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
