"""Remembers descriptions of trees, so that a loop which saves one structure many times describes it only once."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._core import dtypes
from .._core.boxes import Box
from .._core.entries import Entry, ValueEntry
from ..errors import UnsupportedError
from .leaves import Catalogue, Described, LocalShard, describe_leaves, leaf_kind, local_parts, value_entry

_MAX_KNOWN = 4  # descriptions that are remembered, as many as `walk` remembers structures


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
