"""Reads data that several processes need only once: one process reads it and sends it to its peers.

Orbax does this too: one replica reads, and the other replicas get the data through a sum in which theirs are zeros.
Treering differs in three ways: every process reads a share, the arrays may be split along any axes, and devices send
the bytes to each other as integers. The module `collective_plan` decides which arrays are read this way.
"""

import bisect
import functools
import itertools
import math
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from .._core import dtypes
from .._core.boxes import Box, box_shape, full_box, intersect, slice_boxes, slices
from .._core.calls import Call
from .._core.entries import ArrayEntry
from .._core.layouts import Layout
from .._core.leaf_paths import join_names
from .._core.source import Source, pieces
from .._processes import consistency
from .._processes.consistency import CollectiveError
from .._pytree import devices
from .._pytree.leaves import write_order_key
from .._threads.pool import prefetch
from ..errors import PeerError, TreeringError
from ..stores.buffers import empty_aligned_array, round_up
from ..stores.read_errors import ReplacedError

_MAX_MESSAGE_BYTES, _MIN_MESSAGE_BYTES = 2 << 20, 32 << 10
_MAX_MEMBERS = 1024  # processes that read together; more processes form several such groups
# bytes; parts of a message begin at multiples of it, and its first unit is the header (see `_write_header`)
_ALIGNMENT_BYTES = 16
_COMPLETE, _FAILED = 1, 2
_CHECKS, _CHECK_SECONDS = 20, 0.1  # after a transfer that failed: how often peers are asked for the reason

Wanted = Sequence[tuple[ArrayEntry, Box]]
WantedBox = tuple[Box, np.ndarray]  # a box that this process wants, and the memory for it
Rounds = list[list[list[int]]]  # by round, then by process: the numbers of the items that it reads and sends
_MIN_READ_BYTES = 1 << 20  # bytes; with less than this for each process, only some of the processes read


class ReadMode(NamedTuple):
    """How processes read an array together.

    | `layout` | `together` | who reads | what each process gets |
    | --- | --- | --- | --- |
    | None | given | the processes in `together` | all of the array |
    | given | None | the holders of each box | its boxes |
    | given | given | the processes in `together` | its boxes |
    """

    layout: Layout | None
    together: tuple[int, ...] | None


class _Item(NamedTuple):
    """A box that several processes read together. Each needs its boxes of the layout, or without a layout all of it."""

    entry: ArrayEntry
    box: Box
    layout: Layout | None


class _Slab(NamedTuple):
    """A part of an item that is read at once.

    item: the position of the item in its exchange.
    """

    item: int
    box: Box
    nbytes: int


class CollectiveReader:
    """Reads boxes, some of which other processes need too; see `treering.formats.Source.read`.

    All processes of the call make one, and call `read` for the same leaves in the same order. Messages take about
    `room` bytes of memory, but at least 96 KiB for each process of an exchange.
    """

    def __init__(self, call: Call, source: Source, how: Mapping[str, ReadMode | None], room: int):
        self._call, self._source, self._how, self._room = call, source, how, room
        self._reads = 0
        self._connected: set[tuple[bool, tuple[int, ...]]] = set()  # kinds of exchanges

    def read(self, wanted: Wanted, *, verify: bool = True, mmap: bool | None = None) -> list[np.ndarray]:
        """Returns the boxes, in the order in which they are wanted.

        A read error is raised only after this process has sent what its peers wait for. Then all processes raise.

        Raises `CollectiveError` if another process has failed, and `PeerError` if one has ended.
        """
        groups: dict[tuple[bool, tuple[int, ...]], dict[_Item, list[WantedBox]]] = {}
        found: list[Any] = [None] * len(wanted)
        for n, (entry, box) in enumerate(wanted):
            if (how := self._how.get(entry.path)) is None:
                continue
            readers = how.together or (_holders(how.layout, box) if how.layout else ())
            members = exchange_members(readers, self._call.index)
            if len(members) > 1:
                item = _Item(
                    entry, full_box(entry.shape) if how.together else box, how.layout if how.together else None
                )
                found[n] = empty_aligned_array(box_shape(box), dtypes.to_numpy(entry.dtype))
                groups.setdefault((item.layout is not None, members), {}).setdefault(item, []).append((box, found[n]))
        # All processes take the groups in one order, so that no two of them wait for one another.
        exchanges = [
            _Exchange(self._call, self._source, members, own, verify, self._reads, self._room)
            for (_, members), own in sorted(groups.items(), key=operator.itemgetter(0))
        ]
        self._reads += 1
        # From here on a process that fails sends what its peers wait for before it raises.
        consistency.check_attempt(self._call)
        for exchange in exchanges:
            if exchange.kind not in self._connected:
                exchange.connect()
                self._connected.add(exchange.kind)
        error: Exception | None = None
        for exchange in exchanges:
            error = exchange.run(error)
        if error:  # A replaced checkpoint is not a failure: all processes have to start again on the new one.
            raise CollectiveError(error, decided=False) if isinstance(error, ReplacedError) else error
        remaining = [n for n, array in enumerate(found) if array is None]
        try:
            arrays = self._source.read([wanted[n] for n in remaining], verify=verify, mmap=mmap)
        except ReplacedError as error:
            raise CollectiveError(error, decided=False) from None
        for n, array in zip(remaining, arrays, strict=True):
            found[n] = array
        return found


class _Exchange:
    """Reads some items together with the processes in `members`.

    own: all items, each with the boxes that this process wants and the memory to fill.
    """

    def __init__(
        self,
        call: Call,
        source: Source,
        members: tuple[int, ...],
        own: Mapping[_Item, Sequence[WantedBox]],
        verify: bool,
        first: int,
        room: int,
    ):
        self._call, self._source, self._members, self._verify = call, source, members, verify
        self._rank = members.index(call.index)
        rank = {entry.path: n for n, entry in enumerate(item.entry for item in own)}
        self._items = sorted(own, key=lambda item: (rank[item.entry.path], item.box))
        self._destinations = [own[item] for item in self._items]
        self._is_broadcast = self._items[0].layout is None
        self.kind = self._is_broadcast, members
        # The messages in memory: those received in this round and the last, and those sent in this round and the next.
        # A process sends one message to all members if they need the same bytes, and else one to each.
        held = 2 * len(members) + 2 if self._is_broadcast else 3 * len(members)
        self._limit = min(max(room // held, _MIN_MESSAGE_BYTES), _MAX_MESSAGE_BYTES)
        # JAX compiles a transfer for each size of a message, so sizes are rounded up to few different ones.
        self._slab_bytes = max(self._limit // 8, _MIN_MESSAGE_BYTES // 2)
        self._slabs = self._cut()
        self._rounds = assign_reads([slab.nbytes for slab in self._slabs], len(members), self._limit, first)
        self._error: Exception | None = None

    def connect(self) -> None:
        """Sends an empty message to all members, so that they connect now.

        Backends connect processes at the first transfer, and then do not wait long for a process that is late.
        """
        self._send(np.zeros((self._rows, self._slab_bytes // 4), np.uint32))

    def run(self, error: Exception | None) -> Exception | None:
        """Fills the memory. Returns the first read error, or None.

        With an `error` of an earlier exchange, this process reads nothing, sends only that it has failed, and returns
        that error.
        """
        self._error = error
        messages = prefetch([functools.partial(self._message, one) for one in self._rounds])
        for dealt, message in zip(self._rounds, messages, strict=True):
            received = self._send(message)
            for sender, numbers in enumerate(dealt):
                if not self._error:
                    try:
                        self._copy_received(sender, numbers, received[sender].view(np.uint8))
                    except Exception as error:
                        self._error = error
        return self._error

    def _send(self, message: np.ndarray) -> np.ndarray:
        try:
            return devices.exchange(message, self._members, self._call.check_all)
        except TreeringError:
            raise
        except (ValueError, RuntimeError) as error:
            # The transfer does not know which process has ended, and why. The peers' own reports do: `check_all`
            # raises a clearer error as soon as one arrives.
            for _ in range(_CHECKS):
                self._call.check_all()
                time.sleep(_CHECK_SECONDS)
            raise PeerError(
                f"{self._source.path}: processes {join_names(tuple(map(str, self._members)))} read it together, and "
                "the data "
                f"of one of them did not arrive: {error}"
            ) from error

    @property
    def _rows(self) -> int:
        return 1 if self._is_broadcast else len(self._members)

    def _cut(self) -> list[_Slab]:
        """Returns the slabs of all items, in the order in which they are on disk."""
        found: list[tuple[Any, _Slab]] = []
        for n, item in enumerate(self._items):
            size = dtypes.itemsize(item.entry.dtype)
            for file, piece in pieces(self._source, item.entry, item.box):
                if (inner := intersect(piece, item.box)) is None:
                    continue
                order = file, write_order_key(size * math.prod(box_shape(piece))), n
                for part in slice_boxes(box_shape(inner), size, self._slab_bytes):
                    box = tuple((a + first, b + first) for (a, b), (first, _) in zip(part, inner, strict=True))
                    found.append(((*order, box), _Slab(n, box, size * math.prod(box_shape(box)))))
        return [slab for _, slab in sorted(found, key=operator.itemgetter(0))]

    def _message(self, dealt: Sequence[Sequence[int]]) -> np.ndarray:
        """Reads and returns the message that this process sends in a round. After an error it says only that."""
        size = _ALIGNMENT_BYTES + max(map(self._nbytes, dealt))
        message = np.zeros((self._rows, round_up(size, self._slab_bytes) // 4), np.uint32)
        numbers = dealt[self._rank]
        if numbers and not self._error:
            try:
                wanted = [(self._items[slab.item].entry, slab.box) for slab in map(self._slabs.__getitem__, numbers)]
                arrays = self._source.read(wanted, verify=self._verify, mmap=False)
                for row, own in enumerate(message.view(np.uint8)):
                    for n, part, memory in self._parts(numbers, row, own):
                        memory[...] = arrays[n][slices(part, wanted[n][1])]
            except Exception as error:
                self._error = error
        for own in message.view(np.uint8):
            _write_header(own, self._call.index, is_complete=not self._error)
        return message

    def _copy_received(self, sender: int, numbers: Sequence[int], message: np.ndarray) -> None:
        """Copies the message of one process to the memory that it is for.

        Skips the message of a process that has failed. That process raises its error at the end, and then all do.
        """
        process = self._members[sender]
        if (is_complete := _check_header(message, process)) is None:
            raise PeerError(
                f"{self._source.path}: expected the bytes that process {process} has read, found other bytes in its "
                "message; nothing is restored"
            )
        if not is_complete:
            return
        for n, part, memory in self._parts(numbers, 0 if self._is_broadcast else self._rank, message):
            for box, array in self._destinations[self._slabs[numbers[n]].item]:
                if (common := intersect(part, box)) is not None:
                    array[slices(common, box)] = memory[slices(common, part)]

    def _parts(self, numbers: Sequence[int], row: int, message: np.ndarray) -> Iterator[tuple[int, Box, np.ndarray]]:
        """Yields the parts of slabs in a message: the position in `numbers`, the box, and its memory in the message."""
        at = _ALIGNMENT_BYTES  # after the seal
        for n, number in enumerate(numbers):
            slab = self._slabs[number]
            dtype = dtypes.to_numpy(self._items[slab.item].entry.dtype)
            for part in self._needed_parts(slab, row):
                memory = np.ndarray(box_shape(part), dtype, message, at)
                at += round_up(memory.nbytes, _ALIGNMENT_BYTES)
                yield n, part, memory

    def _needed_parts(self, slab: _Slab, row: int) -> list[Box]:
        """Returns the boxes of a slab that one process needs."""
        layout = self._items[slab.item].layout
        if layout is None:
            return [slab.box]
        process = self._members[row]
        cells = [n for n in layout.boxes.overlapping(slab.box) if process in layout.holders[n]]
        return [common for n in cells if (common := intersect(layout.boxes[n], slab.box)) is not None]

    def _nbytes(self, numbers: Sequence[int]) -> int:
        """Returns the size in bytes of the largest message that a process sends of these slabs, without its seal."""
        if self._is_broadcast:
            return sum(round_up(self._slabs[n].nbytes, _ALIGNMENT_BYTES) for n in numbers)
        sizes = dict.fromkeys(self._members, 0)
        for slab in map(self._slabs.__getitem__, numbers):
            item = self._items[slab.item]
            layout, size = item.layout, dtypes.itemsize(item.entry.dtype)
            assert layout
            for n in layout.boxes.overlapping(slab.box):
                if common := intersect(layout.boxes[n], slab.box):
                    for process in layout.holders[n]:
                        sizes[process] += round_up(size * math.prod(box_shape(common)), _ALIGNMENT_BYTES)
        return max(sizes.values())


def _write_header(message: np.ndarray, process: int, *, is_complete: bool) -> None:
    """Writes the seal of a message: its checksum, if the sender could read all of it, and which process sends it."""
    message[8] = _COMPLETE if is_complete else _FAILED
    message[12:16].view(np.uint32)[0] = process
    message[:8].view(np.uint64)[0] = xxhash.xxh3_64_intdigest(message[8:].data)


def _check_header(message: np.ndarray, process: int) -> bool | None:
    """Returns True if a message is complete, False if its sender has failed, and None if its bytes were changed."""
    good = message[:8].view(np.uint64)[0] == xxhash.xxh3_64_intdigest(message[8:].data)
    if not good or message[12:16].view(np.uint32)[0] != process or message[8] not in (_COMPLETE, _FAILED):
        return None
    return bool(message[8] == _COMPLETE)


def exchange_members(processes: tuple[int, ...], index: int) -> tuple[int, ...]:
    """Returns those of `processes` that process `index`, one of them, reads together with.

    They are limited because each process holds a message of every member in memory.
    """
    if len(processes) <= _MAX_MEMBERS:
        return processes
    circles = -(-len(processes) // _MAX_MEMBERS)
    edges = [len(processes) * n // circles for n in range(circles + 1)]
    n = bisect.bisect_right(edges, processes.index(index)) - 1
    return processes[edges[n] : edges[n + 1]]


def _holders(layout: Layout, box: Box) -> tuple[int, ...]:
    """Returns the processes that hold a box of a layout."""
    return tuple(layout.holders[next(layout.boxes.overlapping(box))])


def assign_reads(nbytes: Sequence[int], processes: int, most: int, first: int = 0) -> Rounds:
    """Divides items, in the order of the disk, so that each process reads one run of about equal size.

    `nbytes` are the sizes of the items. A process sends at most `most` bytes per round, except a single item that is
    larger. If there is less than a megabyte for each process, fewer processes read. They begin with process `first`,
    so that callers can rotate the readers from call to call.
    """
    *starts, total = itertools.accumulate(nbytes, initial=0)
    readers = max(1, min(processes, total // _MIN_READ_BYTES))
    edges = [bisect.bisect_left(starts, total * n // readers) for n in range(readers)] + [len(nbytes)]
    rounds: Rounds = []
    for n, (begin, end) in enumerate(itertools.pairwise(edges)):
        process = (first + n * processes // readers) % processes
        for at, chunk in enumerate(_chunks(nbytes, begin, end, most)):
            if at == len(rounds):
                rounds.append([[] for _ in range(processes)])
            rounds[at][process] = chunk
    return rounds


def _chunks(nbytes: Sequence[int], begin: int, end: int, most: int) -> list[list[int]]:
    chunks: list[list[int]] = []
    held = most + 1
    for n in range(begin, end):
        if held + nbytes[n] > most:
            chunks.append([])
            held = 0
        chunks[-1].append(n)
        held += nbytes[n]
    return chunks
