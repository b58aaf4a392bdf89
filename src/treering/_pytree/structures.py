"""Descriptions of trees that were described before: a loop that saves one structure again and again pays once."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._core import dtypes
from .._core.boxes import Box
from .._core.entries import Entry, ValueEntry
from ..errors import UnsupportedError
from .leaves import Catalogue, Described, LocalShard, describe, kind_of, parts_of, value_entry

_MOST = 4  # descriptions that are remembered, as many as `walk` has structures


class _Known(NamedTuple):
    """What a description follows from, leaf by leaf, and the description but for the arrays.

    `values` are the leaves that are plain values, whose entries are made anew; all others are arrays of JAX. `order`
    has the leaf of each shard (None: each leaf is one), and `apart` the numbers of the shards that are held by a part
    of their leaf, by leaf and box.
    """

    paths: Sequence[str]
    options: tuple[Any, ...]
    types: list[type]
    avals: list[Any]
    shardings: list[Any]
    committed: list[bool]
    values: list[int]
    order: list[int] | None
    apart: Mapping[int, Mapping[Box, int]]
    catalogue: Catalogue
    shards: tuple[LocalShard, ...]


_known: tuple[_Known, ...] = ()  # the last used first; replaced as a whole, so no thread has to wait for another


def described(
    paths: Sequence[str],
    leaves: Sequence[Any],
    *,
    dtype: Any = None,
    detach: bool = False,
    alone: bool = True,
    together: bool = False,
) -> Described:
    """What `leaves.describe` says, whose options these are; quickly where the same was described before.

    paths: one object for one structure, as `walk` has it.
    """
    global _known
    # As text: NumPy says that the dtype float64 is equal to None.
    options = (None if dtype is None else dtypes.to_text(dtypes.asked(dtype)), detach, alone, together)
    known = next((one for one in _known if one.paths is paths and one.options == options), None)
    found = None if known is None else _again(known, leaves)
    if found is None:
        found = describe(paths, leaves, dtype=dtype, detach=detach, alone=alone, together=together)
        known = _learned(paths, options, leaves, found)
    if known is not None and (not _known or _known[0] is not known):
        others = [one for one in _known if one.paths is not paths or one.options != options]
        _known = (known, *others[: _MOST - 1])
    return found


def _again(known: _Known, leaves: Sequence[Any]) -> Described | None:
    """The description of leaves that are like those of the last time; None where any is not."""
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
        except UnsupportedError:  # which is said of all leaves together
            return None
        catalogue = catalogue._replace(entries=entries)
    data = list(leaves) if known.order is None else [leaves[n] for n in known.order]
    for leaf, numbers in known.apart.items():
        for box, part in parts_of(leaves[leaf]):
            data[numbers[box]] = part
    return Described(catalogue, known.shards, data)


def _learned(paths: Sequence[str], options: tuple[Any, ...], leaves: Sequence[Any], found: Described) -> _Known | None:
    """What makes a description known; None where there are other leaves than plain values and arrays of JAX."""
    kinds = [kind_of(type(leaf)) for leaf in leaves]
    if set(kinds) - {"jax", "key", "value"}:
        return None
    values = [n for n, kind in enumerate(kinds) if kind == "value"]
    arrays = _arrays(leaves, values)
    apart: dict[int, dict[Box, int]] = {}
    for n, (shard, one) in enumerate(zip(found.shards, found.data, strict=True)):
        if leaves[shard.leaf] is not one:
            apart.setdefault(shard.leaf, {})[shard.box] = n
    order = [shard.leaf for shard in found.shards]
    return _Known(
        paths,
        options,
        list(map(type, leaves)),
        [array.aval for array in arrays],
        [array.sharding for array in arrays],
        [array.committed for array in arrays],
        values,
        None if order == list(range(len(leaves))) else order,
        apart,
        found.catalogue._replace(entries=_without(found.catalogue.entries, values)),
        found.shards,
    )


def _without(entries: Sequence[Entry], values: Sequence[int]) -> Sequence[Entry]:
    """The entries, of plain values the paths alone: text and bytes may be large, and are not those of the next time."""
    if not values:
        return entries
    bare = list(entries)
    for n in values:
        bare[n] = ValueEntry(entries[n].path, "none")
    return bare


def _arrays(leaves: Sequence[Any], values: Sequence[int]) -> Sequence[Any]:
    """The leaves that are no plain values."""
    if not values:
        return leaves
    beside = set(values)
    return [leaf for n, leaf in enumerate(leaves) if n not in beside]
