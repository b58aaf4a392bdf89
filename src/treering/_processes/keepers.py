"""Chooses keepers: processes that write second copies of their peers' pieces on the disk of another host.

A keeper holds the piece in memory, so its copy takes no traffic. A piece that only one host holds has no keeper: its
file is sent after the commit. All functions are pure: every process computes the same answer.
"""

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._core import dtypes
from .._core.boxes import box_shape
from .._pytree.leaves import Catalogue
from .assignment import NO_KEEPER, Assignment, held_layout

_MIN_KEPT_PART = 8  # Pieces with a keeper get a file of their own from an eighth of the bytes without one.


def with_keepers(catalogue: Catalogue, shares: Mapping[int, Assignment], hosts: Sequence[int]) -> dict[int, Assignment]:
    """Returns the shares of `assign` with keepers. `hosts` has the number of the disk of each process.

    Each writer gets as few keepers as its pieces allow, because each keeper takes a file of its own. A keeper is on the
    next disk, in a ring, among those whose processes hold the piece; on that disk it has the least to write so far.
    """
    classes: dict[tuple[int, ...], int] = {}  # the numbers of the distinct sets of holders
    of_layout: dict[int, np.ndarray] = {}  # by the identity of a `Holders`: the class of each box
    of_leaf: dict[int, np.ndarray] = {}  # the class of each box of the share, and its writer, as one number
    nbytes: dict[int, int] = {}
    count, everyone = len(hosts), tuple(range(len(hosts)))
    for leaf, share in shares.items():
        entry: Any = catalogue.entries[leaf]
        layout, _ = held_layout(catalogue, leaf, everyone)
        if (own := of_layout.get(id(layout.holders))) is None:
            numbers = [classes.setdefault(holders, len(classes)) for holders in layout.holders]
            own = of_layout[id(layout.holders)] = np.array(numbers, np.int64)
        if share.layout is None:  # The boxes are parts of those of the layout.
            own = own[[next(layout.boxes.overlapping(box), 0) for box in share.boxes]]
            sizes = np.array([math.prod(box_shape(box)) for box in share.boxes], np.int64)
        else:
            sizes = layout.elements
        of_leaf[leaf] = own * count + np.asarray(share.writers)
        keys, at = np.unique(of_leaf[leaf], return_inverse=True)
        sums = np.bincount(at, sizes * dtypes.itemsize(entry.dtype))
        for key, size in zip(keys.tolist(), sums.tolist(), strict=True):
            nbytes[key] = nbytes.get(key, 0) + int(size)
    found = _keeper_of_each(nbytes, list(classes), hosts)
    return {
        leaf: share._replace(keepers=np.array([found[key] for key in of_leaf[leaf].tolist()], np.int64))
        for leaf, share in shares.items()
    }


def _keeper_of_each(
    nbytes: Mapping[int, int], classes: Sequence[tuple[int, ...]], hosts: Sequence[int]
) -> dict[int, int]:
    """Returns the keeper for each set of holders and writer, given as one number; `nbytes` has their bytes."""
    count = len(hosts)
    by_disk = [_by_disk(holders, hosts) for holders in classes]
    loads = [0] * count
    found: dict[int, int] = {}
    order = sorted(nbytes, key=lambda key: (key % count, len(by_disk[key // count]), -nbytes[key], key))
    for writer, keys in itertools.groupby(order, lambda key: key % count):
        groups: dict[int, list[int]] = {NO_KEEPER: []}
        for key in keys:  # The fewest holders come first; the rest may follow to the same keepers.
            holders = by_disk[key // count]
            again = (q for q in groups if q != NO_KEEPER and q in holders.get(hosts[q], ()))
            keeper = next(again, None)
            if keeper is None:
                keeper = _next_on_another_disk(holders, hosts[writer], loads)
            groups.setdefault(keeper, []).append(key)
            if keeper != NO_KEEPER:
                loads[keeper] += nbytes[key]
        sizes = {keeper: sum(nbytes[key] for key in own) for keeper, own in groups.items()}
        for keeper, own in groups.items():
            is_small = sizes[keeper] * _MIN_KEPT_PART < sizes[NO_KEEPER]
            found.update(dict.fromkeys(own, NO_KEEPER if is_small else keeper))
    return found


def _by_disk(holders: Sequence[int], hosts: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for process in holders:
        found.setdefault(hosts[process], []).append(process)
    return dict(sorted(found.items()))


def _next_on_another_disk(by_disk: Mapping[int, Sequence[int]], disk: int, loads: Sequence[int]) -> int:
    disks = list(by_disk)
    chosen = disks[bisect.bisect_right(disks, disk) % len(disks)]
    return NO_KEEPER if chosen == disk else min(by_disk[chosen], key=loads.__getitem__)
