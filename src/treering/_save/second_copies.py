"""Second copies of array files, written during a save if each host has a disk of its own.

With a copy on the disk of another host, the step outlives its host before it is uploaded. Copies are made from memory,
without network traffic: a keeper also holds the pieces of a file, and writes the same bytes as the process whose file
it copies. A piece that only one host holds has no keeper. After the commit, the files that still lack a copy are
fetched.

The choice of keepers is pure: every process computes the same answer.
"""

import bisect
import contextlib
import itertools
import logging
import math
import posixpath
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._core import dtypes
from .._core.boxes import box_shape
from .._core.entries import Entry
from .._core.layouts import Holders
from .._processes import assignment
from .._processes.assignment import NO_KEEPER, Assignment, Piece, held_layout
from .._pytree.leaves import Catalogue, LocalShard
from ..formats.treering.manifest_fields import File
from ..formats.treering.removal import logging_errors
from ..formats.treering.save_files import SaveFiles
from ..stores.store import Sink
from . import layout
from .layout import PlannedFile

# A writer puts the pieces with one keeper in a file of their own if they have at least this fraction of the bytes that
# it writes without a keeper. Fewer bytes are not worth another file: their second copy is sent after the commit.
_MIN_KEPT_FRACTION = 1 / 8


def with_keepers(catalogue: Catalogue, shares: Mapping[int, Assignment], hosts: Sequence[int]) -> dict[int, Assignment]:
    """Returns the shares of `assign` with keepers.

    hosts: for each process, the lowest process that shares its disk.

    A writer has a file of its own for each keeper, so its pieces share keepers where they can. A new keeper is on the
    next disk after that of the writer, in a ring of the disks whose processes hold the piece. Of the processes of that
    disk it is the one that keeps the fewest bytes so far.
    """
    classes: dict[tuple[int, ...], int] = {}  # the numbers of the distinct sets of holders
    of_holders: dict[Holders, np.ndarray] = {}  # the class of each box
    patterns: dict[Any, _Pattern] = {}
    of_leaf: dict[int, Any] = {}  # the name of the pattern of each leaf
    count, everyone = len(hosts), tuple(range(len(hosts)))
    for leaf, share in shares.items():
        entry: Any = catalogue.entries[leaf]
        layout, _ = held_layout(catalogue, leaf, everyone)
        if (of_boxes := of_holders.get(layout.holders)) is None:
            numbers = [classes.setdefault(holders, len(classes)) for holders in layout.holders]
            of_boxes = of_holders[layout.holders] = np.array(numbers, np.int64)
        if share.layout is None:  # The boxes are parts of those of the layout. An empty box may have any class.
            of_boxes = of_boxes[[next(layout.boxes.overlapping(box), 0) for box in share.boxes]]
            sizes, name = np.array([math.prod(box_shape(box)) for box in share.boxes], np.int64), leaf
        else:
            sizes, name = layout.elements, (layout.holders, share.turn)
        if name not in patterns:
            patterns[name] = _Pattern(of_boxes * count + np.asarray(share.writers), np.zeros(len(of_boxes), np.int64))
        of_leaf[leaf] = name
        patterns[name].nbytes[:] += sizes * dtypes.itemsize(entry.dtype)
    nbytes: dict[int, int] = {}
    for keys, sizes in patterns.values():
        distinct, at = np.unique(keys, return_inverse=True)
        sums = np.bincount(at, sizes).astype(np.int64)
        for key, size in zip(distinct.tolist(), sums.tolist(), strict=True):
            nbytes[key] = nbytes.get(key, 0) + size
    found = _keeper_of_each(nbytes, list(classes), hosts)
    keepers = {name: np.array([found[key] for key in own.keys.tolist()], np.int64) for name, own in patterns.items()}
    return {leaf: share._replace(keepers=keepers[of_leaf[leaf]]) for leaf, share in shares.items()}


class _Pattern(NamedTuple):
    """The boxes of arrays with the same holders and writers.

    keys: the class of the holders of each box times the number of processes, plus the writer of the box.
    nbytes: the bytes of each box, of all these arrays together.
    """

    keys: np.ndarray[Any, np.dtype[np.int64]]
    nbytes: np.ndarray[Any, np.dtype[np.int64]]


def _keeper_of_each(
    nbytes: Mapping[int, int], classes: Sequence[tuple[int, ...]], hosts: Sequence[int]
) -> dict[int, int]:
    """Returns the keeper for each key of `_Pattern`.

    nbytes: the bytes of the boxes with each key. classes: the sets of holders, by the number of the class.
    """
    count = len(hosts)
    by_disk = [_by_disk(holders, hosts) for holders in classes]
    loads = [0] * count
    found: dict[int, int] = {}
    order = sorted(nbytes, key=lambda key: (key % count, len(by_disk[key // count]), -nbytes[key], key))
    for writer, keys in itertools.groupby(order, lambda key: key % count):
        groups: dict[int, list[int]] = {NO_KEEPER: []}
        for key in keys:  # Pieces on few disks have the least choice. They come first, so others may share keepers.
            holders = by_disk[key // count]
            known = (one for one in groups if one != NO_KEEPER and one in holders.get(hosts[one], ()))
            keeper = next(known, None)
            if keeper is None:
                keeper = _next_on_another_disk(holders, hosts[writer], loads)
            groups.setdefault(keeper, []).append(key)
            if keeper != NO_KEEPER:
                loads[keeper] += nbytes[key]
        sizes = {keeper: sum(nbytes[key] for key in own) for keeper, own in groups.items()}
        for keeper, own in groups.items():
            is_small = sizes[keeper] < sizes[NO_KEEPER] * _MIN_KEPT_FRACTION
            found.update(dict.fromkeys(own, NO_KEEPER if is_small else keeper))
    return found


def _by_disk(holders: Sequence[int], hosts: Sequence[int]) -> dict[int, list[int]]:
    """Returns the holders by disk, both ascending."""
    found: dict[int, list[int]] = {}
    for process in holders:
        found.setdefault(hosts[process], []).append(process)
    return dict(sorted(found.items()))


def _next_on_another_disk(by_disk: Mapping[int, Sequence[int]], disk: int, loads: Sequence[int]) -> int:
    """Returns the process with the smallest load on the next disk after `disk`, in the ring of the holders' disks.

    Returns `NO_KEEPER` if no other disk has a holder.
    """
    disks = list(by_disk)
    chosen = disks[bisect.bisect_right(disks, disk) % len(disks)]
    return NO_KEEPER if chosen == disk else min(by_disk[chosen], key=loads.__getitem__)


_log = logging.getLogger("treering")


class PlannedCopy(NamedTuple):
    """A second copy before it is written.

    name, file: the name and the plan of the file that it copies, which another process writes.
    pieces: the pieces of that file, as shards of this process.
    """

    name: str
    file: PlannedFile
    pieces: Sequence[Piece]


def plan(
    entries: Sequence[Entry],
    shards: Sequence[LocalShard],
    shares: Mapping[int, Assignment],
    index: int,
    count: int,
    token: str,
) -> list[PlannedCopy]:
    """Returns the second copies that process `index` of `count` writes."""
    found: list[PlannedCopy] = []
    for writer, pieces in assignment.kept_pieces(entries, shards, shares, index).items():
        # All files of the writer are planned again here, because the name of each depends on how many there are.
        files: dict[int, list[PlannedFile]] = {}
        for keeper, sizes in assignment.sizes_by_keeper(entries, shares, writer).items():
            # The pieces of other keepers are only planned, so they need no shard: -1 stands for it.
            own = pieces if keeper == index else [Piece(leaf, box, -1, 0, nbytes) for leaf, box, nbytes in sizes]
            files[keeper] = layout.plan(entries, own)
        names = iter(layout.names(token, sum(map(len, files.values())), writer, count))
        named = [(keeper, next(names), file) for keeper, own in files.items() for file in own]
        found += [PlannedCopy(name, file, pieces) for keeper, name, file in named if keeper == index]
    return found


class OptionalSink:
    """Writes a second copy; see `Sink`. An `OSError` ends the copy and not the save: later calls do nothing."""

    def __init__(self, files: SaveFiles, name: str):
        self._files, self._name = files, name
        self._sink: Sink | None = None
        self._problem: OSError | None = None
        with self._ending_copy_on_error():
            self._sink = files.create(name, waits=False)

    def preallocate(self, nbytes: int) -> memoryview | None:
        if sink := self._sink:
            with self._ending_copy_on_error():
                return sink.preallocate(nbytes)
        return None

    def write(self, data: memoryview, offset: int) -> None:
        if sink := self._sink:
            with self._ending_copy_on_error():
                sink.write(data, offset)

    def finish(self, nbytes: int) -> None:
        if sink := self._sink:
            with self._ending_copy_on_error():
                sink.finish(nbytes, read_only=True)

    def end(self) -> bool:
        """Returns True if the copy is complete. Otherwise removes it and logs the error."""
        if self._problem is None:
            return True
        self._files.discard(self._name)
        path = posixpath.join(self._files.path, self._name)
        _log.warning(
            "%s: this second copy cannot be written: %s. It is fetched over the network after the commit; if that "
            "fails too, check this disk",
            path, self._problem,
        )  # fmt: skip
        return False

    @contextlib.contextmanager
    def _ending_copy_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._sink, self._problem = None, error


def differing_copies(listed: Sequence[Sequence[File]], copies: Sequence[Sequence[File]]) -> list[str]:
    """Returns the names of the copies whose bytes differ from the files that they copy.

    listed: the files that each process has written. copies: the second copies that each process has written.
    """
    files = {file.name: file for own in listed for file in own}
    return [copy.name for own in copies for copy in own if files.get(copy.name) != copy]


def remove(files: SaveFiles, names: Collection[str]) -> None:
    """Removes the copies with these names, which differ from the files that they copy."""
    for name in names:
        files.discard(name)
        _log.warning(
            "%s: this second copy is removed, because it differs from the file that it copies: two processes hold "
            "different values of a replicated array. The checkpoint has those of the other process; make the array "
            "equal in all processes, such as by the same seed",
            posixpath.join(files.path, name),
        )
    if names:
        with logging_errors(files.path):
            files.store.settle(files.path)
