"""Restoring: match, read, place, and the tree again."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from . import _dtypes, _flax, _match, _place, _tree
from ._catalogue import ArrayEntry, Entry
from ._match import Policy, Target
from ._place import Where
from ._sharding import Box, whole
from .errors import MismatchError
from .formats import Reader

_BUDGET = 256 << 20  # bytes of host memory in use at a time, where arrays pass through it


def restore(
    reader: Reader,
    entries: Mapping[str, Entry],
    skeleton: _tree.Skeleton | None,
    like: Any,
    policy: Policy,
    *,
    name: str,
    sharding: Any,
    verify: bool,
    mmap: bool | None,
    memory_limit: int | None,
) -> Any:
    """The tree of `entries` in the shape of `like`, or as nested containers when that is None."""
    if like is None:
        listed = list(entries.values())
        targets = _match.untemplated(listed, policy, sharding is not None, name)
        places = _untemplated_places(sharding, entries, skeleton)
        values = _values(reader, list(entries), targets, places, verify, mmap, memory_limit)
        return _tree.nest(entries, values) if skeleton is None else _tree.build(skeleton, values)
    template, join = _flax.split(like)
    walked = _tree.walk(template)
    targets = _match.match(walked, entries, skeleton, policy, name)
    places = _place.resolve(sharding, template, walked.paths, walked.leaves, [_shaped(t) for t in targets])
    values = _values(reader, walked.paths, targets, places, verify, mmap, memory_limit)
    if sharding is not None:  # what `missing` took from the template goes where the rest goes
        values = [
            jax.device_put(value, place) if isinstance(value, jax.Array) and target.make == "value" else value
            for value, target, place in zip(values, targets, places, strict=True)
        ]
    return join(_tree.flatten(template)[1].unflatten(values))


def _untemplated_places(sharding: Any, entries: Mapping[str, Entry], skeleton: _tree.Skeleton | None) -> list[Where]:
    if sharding is None:
        return [None] * len(entries)
    listed = list(entries.values())
    template = _tree.nest(entries, listed) if skeleton is None else _tree.build(skeleton, listed)
    walked = _tree.walk(template)
    shaped = [leaf if isinstance(leaf, ArrayEntry) else None for leaf in walked.leaves]
    places = dict(zip(walked.paths, _place.resolve(sharding, template, walked.paths, shaped, shaped), strict=True))
    return [places[path] for path in entries]


def _shaped(target: Target) -> Any:
    if target.make not in ("jax", "key"):
        return None
    shape = target.entry.shape if target.entry else ()
    return jax.ShapeDtypeStruct(shape[:-1] if target.make == "key" else shape, target.dtype)


def _values(
    reader: Reader,
    paths: Sequence[str],
    targets: Sequence[Target],
    places: Sequence[Where],
    verify: bool,
    mmap: bool | None,
    limit: int | None,
) -> list[Any]:
    values: list[Any] = [target.value for target in targets]
    needed: list[tuple[int, list[Box]]] = []
    for n, target in enumerate(targets):
        if target.entry is not None:
            shape = target.entry.shape
            needed.append((n, _place.boxes(places[n], shape) if target.make == "jax" else [whole(shape)]))
    for group in _groups(needed, targets, _BUDGET if limit is None else limit):
        wanted = [(_entry(targets[n]), box) for n, boxes in group for box in boxes]
        arrays = iter(reader.read(wanted, verify=verify, map=mmap))
        to_jax: list[tuple[int, list[np.ndarray]]] = []
        for n, boxes in group:
            own = [_cast(next(arrays), targets[n], paths[n]) for _ in boxes]
            if targets[n].make == "jax":
                to_jax.append((n, own))
            else:
                values[n] = _on_host(own[0], targets[n], places[n])
        made = _place.put([(places[n], _entry(targets[n]).shape, own) for n, own in to_jax])
        for (n, _), array in zip(to_jax, made, strict=True):
            values[n] = _place.weaken(array) if targets[n].weak else array
    lone = [n for n, target in enumerate(targets) if target.make in ("jax", "numpy") and target.entry is None]
    for n in lone:  # an int where the template has a 0-d array
        array = np.array(targets[n].value, targets[n].dtype)
        values[n] = array if targets[n].make == "numpy" else _place.put([(places[n], (), [array])])[0]
        if targets[n].weak:
            values[n] = _place.weaken(values[n])
    return values


def _entry(target: Target) -> ArrayEntry:
    assert target.entry is not None
    return target.entry


def _groups(
    needed: Sequence[tuple[int, list[Box]]], targets: Sequence[Target], limit: int
) -> Iterator[Sequence[tuple[int, list[Box]]]]:
    group: list[tuple[int, list[Box]]] = []
    held = 0
    for item in needed:
        entry = _entry(targets[item[0]])
        nbytes = int(np.prod(entry.shape, dtype=object)) * _dtypes.itemsize(entry.dtype)
        if group and held + nbytes > limit:
            yield group
            group, held = [], 0
        group.append(item)
        held += nbytes
    yield group


def _cast(array: np.ndarray, target: Target, path: str) -> np.ndarray:
    if target.dtype is None or array.dtype == target.dtype:
        return array
    if _dtypes.is_integer(array.dtype) and not _match.fits(array, target.dtype):
        raise MismatchError(
            f"{path}: expected {target.dtype.name} (template), found values of {array.dtype.name} that do not fit it; "
            f"use {array.dtype.name} in the template"
        )
    return array.astype(target.dtype)


def _on_host(array: np.ndarray, target: Target, place: Where) -> Any:
    if target.make == "int":
        return int(array)
    if target.make == "numpy-scalar":
        return array[()]
    if target.make == "key":
        key = jax.random.wrap_key_data(jax.numpy.asarray(array), impl=_entry(target).impl)
        return key if place is None else jax.device_put(key, place)
    return array
