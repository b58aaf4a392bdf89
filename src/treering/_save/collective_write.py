"""Prepares a checkpoint in another library's format that several processes write in parallel."""

import math
from collections.abc import Mapping

from .._core.boxes import Cells, full_box
from .._core.entries import ArrayEntry
from .._processes.layouts import Layout, held_by, layout_of, owner
from .._pytree.leaves import Catalogue, Described
from ..formats import JointFormat


def can_write(format: JointFormat, catalogue: Catalogue) -> bool:
    """Returns True if each process can write its part of the arrays that are spread over several processes."""
    for leaf in catalogue.global_leaves:
        entry = _array(catalogue, leaf)
        layout = layout_of(catalogue.shardings[leaf], entry.shape)
        if not layout.is_regular or not format.splits(entry):
            return False
    return True


def replicated_shards(described: Described) -> Described:
    """Describes the arrays that every process has a copy of, which must be equal in all processes."""
    catalogue, shards, _ = described
    chosen = tuple(shard for shard in shards if shard.leaf not in catalogue.global_leaves)
    return Described(catalogue, chosen, [None] * len(chosen))


def layouts(catalogue: Catalogue, single: Mapping[int, int]) -> dict[str, Layout]:
    """Returns, by path, the layout of each array of which some process lacks a part.

    `single` maps each leaf that only one process holds to that process.
    """
    found: dict[str, Layout] = {}
    for leaf in catalogue.global_leaves - single.keys():
        entry = _array(catalogue, leaf)
        layout = layout_of(catalogue.shardings[leaf], entry.shape)
        if math.prod(entry.shape) and owner(layout) is None:
            found[entry.path] = layout
    for leaf, process in single.items():
        entry = _array(catalogue, leaf)
        if math.prod(entry.shape):
            found[entry.path] = held_by(Cells.of([full_box(entry.shape)])[0], (process,))
    return found


def _array(catalogue: Catalogue, leaf: int) -> ArrayEntry:
    entry = catalogue.entries[leaf]
    assert isinstance(entry, ArrayEntry)
    return entry
