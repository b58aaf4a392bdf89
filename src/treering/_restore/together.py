"""Restoring in several processes: what more than one of them needs is read by one, which sends it to the others.

Orbax restores so, too: one replica reads, and sums over all replicas bring the rest zeros and it. Here every process
reads a share, of arrays that are split along other axes as well, and integers are moved from device to device.
"""

import functools
import itertools
import logging
import math
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from .. import stores
from .._core import dtypes
from .._core.boxes import Box, box_shape, byte_ranges, in_slices, intersect, slices, whole
from .._core.entries import ArrayEntry
from .._core.leaf_paths import few
from .._core.source import Source, pieces
from .._core.views import View
from .._processes import consistency
from .._processes.assignment import Layout, alignment, layout_of, owner
from .._processes.calls import Call
from .._processes.consistency import TogetherError
from .._processes.dealing import deal
from .._pytree import devices
from .._threads.ahead import ahead
from ..errors import MismatchError, PeerError, TreeringError, UnsupportedError
from ..stores.buffers import adoptable, round_up
from ..stores.read_errors import ReplacedError
from . import place as _place
from .place import Where
from .targets import Target

_log = logging.getLogger("treering")
_ROOM = 64 << 20  # bytes of messages that a process holds at a time
_MOST, _LEAST = 2 << 20, 256 << 10  # bytes that a process sends at a time
_CHECKED = 1 << 20  # bytes that are read and checked together
_WORTH = 1.05  # times what is needed, up to which each process may as well read for itself
_MOST_RECEIVERS = 1024  # processes; among more of them, who gets which part of an array would take too long to work out
_UNIT = 16  # bytes, at multiples of which parts of a message begin; the first such is its seal
_WHOLE, _FAILED = 1, 2
_LOOKS, _LOOK_SECONDS = 20, 0.1  # after a transfer that failed

_NO_IDENTITY = "the format records nothing by which processes can tell that they read the same checkpoint"

_Found = Mapping[str, tuple[ArrayEntry, Layout | None]]
Wanted = Sequence[tuple[ArrayEntry, Box]]
Own = tuple[Box, np.ndarray]  # a box that this process wants, and the memory for it


class _Item(NamedTuple):
    """A box of an array that several processes read together; each needs its boxes of the layout (None: all of it)."""

    entry: ArrayEntry
    box: Box
    layout: Layout | None


class _Slab(NamedTuple):
    """A part of an item that is read at once."""

    item: int
    box: Box
    nbytes: int


def shared(
    call: Call | None,
    source: Source,
    targets: Sequence[Target],
    places: Sequence[Where],
    read: str | None,
    *,
    alike: Sequence[Any],
) -> "ReadTogether | None":
    """A source that reads once for all processes of a call; None when each process is to read for itself.

    read: "once", "each", or None for "once" when several processes need the same bytes, and no host has them at hand.
    alike: what else must be the same in all processes for them to make the same steps.

    Raises `MismatchError` and `UnsupportedError` when "once" is asked for and cannot be.
    """
    if call is None or call.count == 1:
        return None
    found = {
        target.entry.path: (target.entry, _layout(target, place))
        for target, place in zip(targets, places, strict=True)
        if target.entry is not None
    }
    how = _plan(source, found, call.count)
    elsewhere = [path for path, (_, layout) in found.items() if layout and owner(layout) not in (None, call.index)]
    near = read is None and stores.of(source.path).is_local(source.path)
    state = {
        "plan": xxhash.xxh3_128_hexdigest(msgspec.json.encode([*alike, *_rows(source, found, how)])),
        "read": read or ("each" if near else None),
        "problem": devices.can_exchange() if source.identity else _NO_IDENTITY,
        "elsewhere": elsewhere,
    }
    chosen = consistency.decide(call, source.identity, state, functools.partial(_choose, source.path))
    if chosen is None:
        return None
    for path in chosen["left out"]:
        how.pop(path, None)
    return ReadTogether(call, source, how) if any(how.values()) else None


def _choose(path: str, states: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The arrays that each process reads for itself although they read together; None when they do not."""
    wishes = {state["read"] for state in states}
    if "each" in wishes:
        return None
    differing = next((n for n, state in enumerate(states) if state["plan"] != states[0]["plan"]), None)
    problem = next((state["problem"] for state in states if state["problem"]), "")
    kind = UnsupportedError
    if not problem and differing is not None:
        kind, problem = (
            MismatchError,
            (f"process {differing} restores other leaves, into other shardings or with other options than process 0"),
        )
    if not problem:
        return {"left out": sorted({one for state in states for one in state["elsewhere"]})}
    if "once" in wishes:
        raise kind(f"{path}: read='once': {problem}; read='each' lets every process read for itself")
    _log.info("%s: every process reads for itself: %s", path, problem)
    return None


def _plan(source: Source, found: "_Found", count: int) -> "dict[str, _How | None]":
    """How each array is read."""
    how = {path: _how(source, entry, layout, count) for path, (entry, layout) in found.items()}
    if any(how.values()):
        for path, (entry, layout) in found.items():  # what is small lies in blocks that are read with the rest
            if how[path] is None and layout and 0 < entry.nbytes < _CHECKED * len(layout.boxes):
                how[path] = _together(layout)
    return how


def _rows(source: Source, found: "_Found", how: "Mapping[str, _How | None]") -> Iterator[Any]:
    """What must be the same of each array in all processes: what it is, what it is made of, where it goes, how."""
    for path, (entry, layout) in found.items():
        made_of = [[one.path, box] for one, box in source.origins(path)] if isinstance(source, View) else []
        split = layout is not None and owner(layout) is None
        way = how[path] if split else None
        together = way and [way.layout is not None, way.together]
        yield [path, entry.dtype, entry.shape, made_of, _text(layout) if layout and split else "", together]


def _layout(target: Target, where: Where) -> Layout | None:
    """The spread of an array over processes; None for one that each process has for itself."""
    if target.make == "key":
        where = _place.of_key_data(where)
    if where is None or target.make not in _place.IN_JAX or _place.on_one_device(where):
        return None
    assert target.entry is not None
    layout = layout_of(where, target.entry.shape)
    return None if where.is_fully_addressable else layout


@functools.lru_cache(maxsize=1024)
def _text(layout: Layout) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([layout.boxes.cuts, layout.holders]))


def _how(source: Source, entry: ArrayEntry, layout: Layout | None, count: int) -> "_How | None":
    """How an array is read together; None when each process may as well read its boxes."""
    if not math.prod(entry.shape):
        return None
    if layout is None:
        return _How(None, tuple(range(count)))
    times, _ = _held(layout)
    some = sorted({0, len(layout.boxes) // 2, len(layout.boxes) - 1})
    size = dtypes.itemsize(entry.dtype)
    needed = size * sum(math.prod(box_shape(layout.boxes[n])) for n in some)
    waste = sum(_beside(source, entry, layout.boxes[n], size) for n in some) / needed
    if times * (1 + waste) <= _WORTH:
        return None
    if waste > _WORTH - 1 and (how := _together(layout)):
        return how
    return _How(layout, None) if times > 1 else None


def _together(layout: Layout) -> "_How | None":
    everyone = _held(layout)[1]
    return _How(layout, everyone) if 1 < len(everyone) <= _MOST_RECEIVERS else None


class _How(NamedTuple):
    """An array without a layout, which is whole in all processes, or one of which boxes are read by their holders.

    With a layout and `together`, all of these processes read the array, and each gets its boxes.
    """

    layout: Layout | None
    together: tuple[int, ...] | None


@functools.lru_cache(maxsize=1024)
def _held(layout: Layout) -> tuple[float, tuple[int, ...]]:
    """By how many processes a box of a layout is held on the average, and all that hold any."""
    everyone = tuple(sorted(set(itertools.chain.from_iterable(set(layout.holders)))))
    return sum(map(len, layout.holders)) / len(layout.boxes), everyone


def _beside(source: Source, entry: ArrayEntry, box: Box, itemsize: int) -> int:
    """About how many bytes are read with a box that are not in it; whole pieces are taken to lie side by side."""
    found = 0
    for _, piece in pieces(source, entry, box):
        inner = intersect(piece, box)
        if inner is None or inner == piece:
            continue
        within = tuple((a - first, b - first) for (a, b), (first, _) in zip(inner, piece, strict=True))
        for begin, end in byte_ranges(box_shape(piece), within, itemsize, _CHECKED):
            found += end - begin + _CHECKED
        found -= itemsize * math.prod(box_shape(inner))
    return found


class ReadTogether:
    """Reads boxes of which some are also needed by other processes; see `treering.formats.Source.read`.

    All processes of the call make one, and call `read` for the same leaves in the same order.
    """

    def __init__(self, call: Call, source: Source, how: Mapping[str, _How | None]):
        self._call, self._source, self._how = call, source, how
        self._reads = 0
        self._connected: set[tuple[bool, tuple[int, ...]]] = set()  # kinds of exchanges

    def read(self, wanted: Wanted, *, verify: bool = True, mmap: bool | None = None) -> list[np.ndarray]:
        """The boxes, in the order in which they are wanted.

        What fails here is raised only when all that the others wait for is sent, and then nobody goes on.

        Raises `TogetherError` when another process has failed, and `PeerError` when one is gone.
        """
        groups: dict[tuple[bool, tuple[int, ...]], dict[_Item, list[Own]]] = {}
        found: list[Any] = [None] * len(wanted)
        for n, (entry, box) in enumerate(wanted):
            if (how := self._how.get(entry.path)) is None:
                continue
            members = how.together or (_holders(how.layout, box) if how.layout else ())
            if len(members) > 1:
                item = _Item(entry, whole(entry.shape) if how.together else box, how.layout if how.together else None)
                found[n] = adoptable(box_shape(box), dtypes.to_numpy(entry.dtype))
                groups.setdefault((item.layout is not None, members), {}).setdefault(item, []).append((box, found[n]))
        # All go by one order of the groups, so that no two wait for one another.
        exchanges = [
            _Exchange(self._call, self._source, members, own, verify, self._reads)
            for (_, members), own in sorted(groups.items(), key=operator.itemgetter(0))
        ]
        self._reads += 1
        consistency.check_all_well(self._call)  # from here on nobody fails before what the others wait for is sent
        for exchange in exchanges:
            if exchange.kind not in self._connected:
                exchange.connect()
                self._connected.add(exchange.kind)
        error: Exception | None = None
        for exchange in exchanges:
            error = exchange.run(error)
        if error:
            raise TogetherError(error, decided=False) if isinstance(error, ReplacedError) else error
        rest = [n for n, array in enumerate(found) if array is None]
        try:
            arrays = self._source.read([wanted[n] for n in rest], verify=verify, mmap=mmap)
        except ReplacedError as error:
            raise TogetherError(error, decided=False) from None
        for n, array in zip(rest, arrays, strict=True):
            found[n] = array
        return found


class _Exchange:
    """Reads some items together with other processes: `own` has them all, and the memory that is to be filled."""

    def __init__(
        self,
        call: Call,
        source: Source,
        members: tuple[int, ...],
        own: Mapping[_Item, Sequence[Own]],
        verify: bool,
        first: int,
    ):
        self._call, self._source, self._members, self._verify = call, source, members, verify
        self._me = members.index(call.index)
        rank = {entry.path: n for n, entry in enumerate(item.entry for item in own)}
        self._items = sorted(own, key=lambda item: (rank[item.entry.path], item.box))
        self._own = [own[item] for item in self._items]
        self._alike = self._items[0].layout is None
        self.kind = self._alike, members
        self._most = min(max(_ROOM // len(members), _LEAST), _MOST)
        self._unit = max(self._most // 8, _LEAST // 2)  # messages of few different sizes, for each is compiled
        self._slabs = self._cut()
        self._rounds = deal([slab.nbytes for slab in self._slabs], len(members), self._most, first)
        self._error: Exception | None = None

    def connect(self) -> None:
        """Sends nothing to all: backends connect processes when they first send, and do not wait for them for long."""
        self._send(np.zeros((self._rows, self._unit // 4), np.uint32))

    def run(self, error: Exception | None) -> Exception | None:
        """Fills the memory. Returns the first error of reading, or the one given, with which nothing is read."""
        self._error = error
        messages = ahead([functools.partial(self._message, one) for one in self._rounds])
        for dealt, message in zip(self._rounds, messages, strict=True):
            came = self._send(message)
            for sender, numbers in enumerate(dealt):
                if not self._error:
                    try:
                        self._take(sender, numbers, came[sender].view(np.uint8))
                    except Exception as error:
                        self._error = error
        return self._error

    def _send(self, message: np.ndarray) -> np.ndarray:
        try:
            return devices.exchange(message, self._members, self._call.check_all)
        except TreeringError:
            raise
        except (ValueError, RuntimeError) as error:
            for _ in range(
                _LOOKS
            ):  # at what the others say: the transfer does not know which of them has ended, and why
                self._call.check_all()
                time.sleep(_LOOK_SECONDS)
            raise PeerError(
                f"{self._source.path}: processes {few(tuple(map(str, self._members)))} read it together, and what one "
                f"of them was to send did not come: {error}"
            ) from error

    @property
    def _rows(self) -> int:
        return 1 if self._alike else len(self._members)

    def _cut(self) -> list[_Slab]:
        """The slabs of all items, in the order of the disk."""
        found: list[tuple[Any, _Slab]] = []
        for n, item in enumerate(self._items):
            size = dtypes.itemsize(item.entry.dtype)
            for file, piece in pieces(self._source, item.entry, item.box):
                if (inner := intersect(piece, item.box)) is None:
                    continue
                order = file, alignment(size * math.prod(box_shape(piece))), n
                for part in in_slices(box_shape(inner), size, self._unit):
                    box = tuple((a + first, b + first) for (a, b), (first, _) in zip(part, inner, strict=True))
                    found.append(((*order, box), _Slab(n, box, size * math.prod(box_shape(box)))))
        return [slab for _, slab in sorted(found, key=operator.itemgetter(0))]

    def _message(self, dealt: Sequence[Sequence[int]]) -> np.ndarray:
        """What this process sends in a round, read from the disk; after an error only that there is one."""
        size = _UNIT + max(map(self._nbytes, dealt))
        message = np.zeros((self._rows, round_up(size, self._unit) // 4), np.uint32)
        numbers = dealt[self._me]
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
            _seal(own, self._call.index, whole=not self._error)
        return message

    def _take(self, sender: int, numbers: Sequence[int], message: np.ndarray) -> None:
        """Copies what came from one process to where it belongs; of one that has failed all will hear at the end."""
        process = self._members[sender]
        if (is_whole := _sealed(message, process)) is None:
            raise PeerError(
                f"{self._source.path}: expected what process {process} has read, found other bytes in what came from "
                "it; nothing is restored"
            )
        if not is_whole:
            return
        for n, part, memory in self._parts(numbers, 0 if self._alike else self._me, message):
            for box, array in self._own[self._slabs[numbers[n]].item]:
                if (common := intersect(part, box)) is not None:
                    array[slices(common, box)] = memory[slices(common, part)]

    def _parts(self, numbers: Sequence[int], row: int, message: np.ndarray) -> Iterator[tuple[int, Box, np.ndarray]]:
        """The parts of slabs in a row of messages: which of the `numbers`, its box, and its place in the message."""
        at = _UNIT  # behind the seal
        for n, number in enumerate(numbers):
            slab = self._slabs[number]
            dtype = dtypes.to_numpy(self._items[slab.item].entry.dtype)
            for part in self._received(slab, row):
                memory = np.ndarray(box_shape(part), dtype, message, at)
                at += round_up(memory.nbytes, _UNIT)
                yield n, part, memory

    def _received(self, slab: _Slab, row: int) -> list[Box]:
        """The parts of a slab that one process needs."""
        layout = self._items[slab.item].layout
        if layout is None:
            return [slab.box]
        process = self._members[row]
        cells = [n for n in layout.boxes.overlapping(slab.box) if process in layout.holders[n]]
        return [common for n in cells if (common := intersect(layout.boxes[n], slab.box)) is not None]

    def _nbytes(self, numbers: Sequence[int]) -> int:
        """The size of the largest message that a process sends of these slabs."""
        if self._alike:
            return sum(round_up(self._slabs[n].nbytes, _UNIT) for n in numbers)
        sizes = dict.fromkeys(self._members, 0)
        for slab in map(self._slabs.__getitem__, numbers):
            item = self._items[slab.item]
            layout, size = item.layout, dtypes.itemsize(item.entry.dtype)
            assert layout
            for n in layout.boxes.overlapping(slab.box):
                if common := intersect(layout.boxes[n], slab.box):
                    for process in layout.holders[n]:
                        sizes[process] += round_up(size * math.prod(box_shape(common)), _UNIT)
        return max(sizes.values())


def _seal(message: np.ndarray, process: int, *, whole: bool) -> None:
    """Begins a message with what makes sure that it arrives: its checksum, whether it is whole, and whose it is."""
    message[8] = _WHOLE if whole else _FAILED
    message[12:16].view(np.uint32)[0] = process
    message[:8].view(np.uint64)[0] = xxhash.xxh3_64_intdigest(message[8:].data)


def _sealed(message: np.ndarray, process: int) -> bool | None:
    """Whether a message of a process is whole; None for one that is not as that process has sent it."""
    good = message[:8].view(np.uint64)[0] == xxhash.xxh3_64_intdigest(message[8:].data)
    if not good or message[12:16].view(np.uint32)[0] != process or message[8] not in (_WHOLE, _FAILED):
        return None
    return bool(message[8] == _WHOLE)


def _holders(layout: Layout, box: Box) -> tuple[int, ...]:
    """The processes that have a box of a layout."""
    return tuple(layout.holders[next(layout.boxes.overlapping(box))])
