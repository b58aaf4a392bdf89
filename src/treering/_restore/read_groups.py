"""Divides the leaves of a restore into groups that are read together, so that each group fits the memory limit."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .._core import casts, dtypes
from .._core.boxes import Box, full_box
from .._core.entries import ArrayEntry
from .._pytree import devices
from .._threads.python_gc import gc_paused
from ..errors import MismatchError, UnsupportedError
from . import array_placement
from .array_placement import ShardingOrNone
from .leaf_targets import LeafTarget


def group_targets(targets: Sequence[LeafTarget], limit: int | None) -> Iterator[list[int]]:
    """Yields the numbers of the leaves to read, in groups of at most `limit` bytes; without a limit in one group.

    The bytes are those of the entire arrays, as saved. So all processes that restore together form the same groups,
    although each may need only a part of each array. A leaf that is larger than the limit is a group of its own.
    """
    numbers = [n for n, target in enumerate(targets) if target.entry is not None]
    if limit is None:
        yield from [numbers] if numbers else []
        return
    group: list[int] = []
    held = 0
    for n in numbers:
        entry = target_entry(targets[n])
        nbytes = _nbytes(entry.shape, entry.dtype)
        if group and held + nbytes > limit:
            yield group
            group, held = [], 0
        group.append(n)
        held += nbytes
    if group:
        yield group


class ReadGroup:
    """Leaves that are read together.

    numbers: the positions of these leaves among all leaves of the template.
    wanted: the boxes to read, in the order of the leaves.
    """

    def __init__(self, targets: Sequence[LeafTarget], places: Sequence[ShardingOrNone], numbers: list[int]):
        self.numbers = numbers
        self.wanted: list[tuple[ArrayEntry, Box]] = []
        self._targets, self._places = targets, places
        self._data_places: list[ShardingOrNone] = []  # where the arrays are made; of keys, their data
        self._counts: list[int] = []  # of the boxes of each leaf
        last: ShardingOrNone = None
        reads_all, shape, box = True, (), full_box(())
        # Thousands of leaves in a row may have one shape and one place, so what the last leaf needed is kept.
        for n in numbers:
            target, place = targets[n], places[n]
            entry: Any = target.entry
            if target.make == "key":
                place = array_placement.key_data_sharding(place)
            if place is not last:
                last, reads_all = place, place is None or bool(array_placement.single_device(place))
            if reads_all or target.make not in array_placement.JAX_MAKES:
                if entry.shape != shape:
                    shape, box = entry.shape, full_box(entry.shape)
                self.wanted.append((entry, box))
                self._counts.append(1)
            else:
                assert place is not None
                boxes = array_placement.local_boxes(place, entry.shape)
                self.wanted += [(entry, box) for box in boxes]
                self._counts.append(len(boxes))
            self._data_places.append(place)

    def put(self, paths: Sequence[str], found: Sequence[np.ndarray], values: list[Any]) -> list[jax.Array]:
        """Writes what was read into `values`. Returns the JAX arrays, whose transfers may not have finished."""
        with gc_paused():
            arrays = iter(found)
            in_jax: list[int] = []
            lost: list[MismatchError] = []
            items: list[array_placement.ArrayToPut] = []
            for n, count, place in zip(self.numbers, self._counts, self._data_places, strict=True):
                target = self._targets[n]
                own = list(itertools.islice(arrays, count))
                dtype, entry = target.dtype, target.entry
                # Most arrays have the right dtype, and this test is quicker than calls of `_cast`.
                if count != 1 or own[0].dtype is not dtype:
                    try:
                        own = [_cast(array, target, paths[n]) for array in own]
                    except MismatchError as error:
                        lost.append(error)
                if target.make in array_placement.JAX_MAKES:
                    assert entry is not None
                    in_jax.append(n)
                    items.append(array_placement.ArrayToPut(place, entry.shape, dtype, target.weak, own))
                else:
                    values[n] = own[0] if target.make == "numpy" else host_value(own[0], target)
            if lost:
                casts.refuse(lost)
            made = array_placement.put_arrays(items)
            for n, item, array in zip(in_jax, items, made, strict=True):
                target = self._targets[n]
                value = as_key(array, target_entry(target)) if target.make == "key" else array
                place = self._places[n]
                # The data of a key is on the default device if `key_data_sharding` has found no place for it.
                values[n] = value if item.where is place else jax.device_put(value, place)
        return made


def target_entry(target: LeafTarget) -> ArrayEntry:
    """Returns the entry of a target that is made of an array of the checkpoint."""
    entry = target.entry
    assert entry is not None
    return entry


@functools.lru_cache(maxsize=1024)
def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * dtypes.itemsize(dtype)


def _cast(array: np.ndarray, target: LeafTarget, path: str) -> np.ndarray:
    if target.dtype is None or array.dtype == target.dtype:
        return array
    return casts.cast(array, target.dtype, path)


def host_value(array: np.ndarray, target: LeafTarget) -> Any:
    """Returns the value of a target that stays on the host, made of an array of the target's dtype."""
    if target.make == "number":
        return target.value(array)
    if target.make == "numpy-scalar":
        return array[()]
    return array


@devices.allow_transfers()
def as_key(data: Any, entry: ArrayEntry) -> Any:
    """Returns key data as a typed key. Raises `UnsupportedError` if JAX cannot make it, such as of an unknown kind."""
    try:
        return jax.random.wrap_key_data(data, impl=entry.impl)
    except (ValueError, TypeError) as error:
        raise UnsupportedError(
            f"{entry.path}: JAX cannot use {entry.dtype}{list(entry.shape)} as a {entry.impl} key ({error}); "
            "use a version of JAX that has this implementation, or register it"
        ) from None
