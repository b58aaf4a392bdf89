"""Decides which arrays several processes read together when they restore. They agree before anything is read."""

import functools
import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from .. import stores
from .._core import dtypes
from .._core.boxes import Box, box_shape, byte_ranges, intersect
from .._core.calls import Call
from .._core.entries import ArrayEntry
from .._core.layouts import Layout, owner
from .._core.source import Source, pieces
from .._core.views import View
from .._processes import consistency
from .._processes.assignment import layout_of
from .._pytree import devices
from ..errors import MismatchError, TreeringError, UnsupportedError
from . import array_placement as _place
from .array_placement import ShardingOrNone
from .collective_read import CollectiveReader, ReadMode
from .leaf_targets import LeafTarget

_log = logging.getLogger("treering")
_BLOCK_BYTES = 1 << 20  # bytes of one checksum, which are always read together
_MAX_REREAD_RATIO = 1.05  # of bytes read to bytes needed; up to it each process may as well read for itself
_MAX_RECEIVERS = 1024  # processes; for more it would take too long to work out which one gets which part of an array
_NO_IDENTITY = "its files store arrays in chunks, or in other ways in which several processes would each read all"

_Found = Mapping[str, tuple[ArrayEntry, Layout | None]]


def collective_reader(
    call: Call | None,
    source: Source,
    targets: Sequence[LeafTarget],
    places: Sequence[ShardingOrNone],
    read: str | None,
    *,
    must_match: Sequence[Any],
    room: int,
) -> CollectiveReader | None:
    """Returns a source that reads once for all processes of a call, or None if each process reads for itself.

    read: "once", "each", or None. None means "once" if several processes need the same bytes and the checkpoint is not
        on a local disk.
    must_match: other values that must be equal in all processes, because they then take the same steps.
    room: bytes of memory for messages, the same in all processes.

    Raises `MismatchError` or `UnsupportedError` if "once" is asked for and not possible.
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
    is_local = read is None and _is_local(source)
    state = {
        "plan": xxhash.xxh3_128_hexdigest(msgspec.json.encode([*must_match, room, *_rows(source, found, how)])),
        "read": read or ("each" if is_local else None),
        "problem": "" if source.identity else _NO_IDENTITY,
        "elsewhere": elsewhere,
        "together": any(how.values()),
    }
    chosen = consistency.decide_for_attempt(call, source.identity, state, functools.partial(_choose, source.path))
    if chosen is None:
        return None
    # This must come last. `can_exchange` may make JAX create its devices, which all processes have to do together.
    if not call.gather_and_decide(
        devices.can_exchange(), functools.partial(_can_exchange, source.path, asked=chosen["asked"])
    ):
        return None
    for path in chosen["left out"]:
        how.pop(path, None)
    return CollectiveReader(call, source, how, room) if any(how.values()) else None


def _is_local(source: Source) -> bool:
    """Returns True if a checkpoint is on a local disk. Only a source of the native format may be on several hosts."""
    known: bool | None = getattr(source, "is_local", None)
    return stores.get(source.path).is_local(source.path) if known is None else known


def _choose(path: str, states: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns what process 0 decides, or None if each process reads for itself.

    "left out" are the arrays that each process reads for itself all the same, because only one process needs them.
    "asked" is True if a caller asked for reading once, so that it is an error if that is not possible.
    """
    wishes = {state["read"] for state in states}
    if "each" in wishes:
        return None
    asked = "once" in wishes
    differing = next((n for n, state in enumerate(states) if state["plan"] != states[0]["plan"]), None)
    problem = next((state["problem"] for state in states if state["problem"]), "")
    if problem:
        return _separate(path, problem, asked=asked)
    if differing is not None:
        problem = f"process {differing} restores other leaves, or with other shardings or options, than process 0"
        return _separate(path, problem, asked=asked, kind=MismatchError)
    if not any(state["together"] for state in states):
        return None
    return {"left out": sorted({one for state in states for one in state["elsewhere"]}), "asked": asked}


def _can_exchange(path: str, problems: Sequence[str], *, asked: bool) -> bool:
    """Returns True if the devices of all processes can exchange data."""
    if problem := next(filter(None, problems), ""):
        _separate(path, problem, asked=asked)
    return not problem


def _separate(path: str, problem: str, *, asked: bool, kind: type[TreeringError] = UnsupportedError) -> None:
    """Logs that each process reads for itself, or raises `kind` if a caller asked for reading once."""
    if asked:
        raise kind(f"{path}: read='once': {problem}; read='each' lets every process read for itself")
    _log.info("%s: every process reads for itself: %s", path, problem)


def _plan(source: Source, found: _Found, count: int) -> dict[str, ReadMode | None]:
    """Returns how the processes read each array together; None for an array that each reads for itself."""
    how = {path: _read_mode(source, entry, layout, count) for path, (entry, layout) in found.items()}
    if any(how.values()):
        # Small arrays share blocks with other arrays, so reading them with the rest costs no extra bytes.
        for path, (entry, layout) in found.items():
            if how[path] is None and layout and 0 < entry.nbytes < _BLOCK_BYTES * len(layout.boxes):
                how[path] = _collective_mode(layout)
    return how


def _rows(source: Source, found: _Found, how: Mapping[str, ReadMode | None]) -> Iterator[Any]:
    """Yields for each array what must be equal in all processes.

    That is its path, dtype and shape, the arrays that rules make it of, its layout, and how it is read.
    """
    for path, (entry, layout) in found.items():
        made_of = [[one.path, box] for one, box in source.origins(path)] if isinstance(source, View) else []
        split = layout is not None and owner(layout) is None
        way = how[path] if split else None
        together = way and [way.layout is not None, way.together]
        yield [path, entry.dtype, entry.shape, made_of, _layout_hash(layout) if layout and split else "", together]


def _layout(target: LeafTarget, where: ShardingOrNone) -> Layout | None:
    """Returns how an array is spread over processes, or None for an array that each process has for itself."""
    if target.make == "key":
        where = _place.key_data_sharding(where)
    if where is None or target.make not in _place.JAX_MAKES or _place.single_device(where):
        return None
    assert target.entry is not None
    layout = layout_of(where, target.entry.shape)
    return None if where.is_fully_addressable else layout


@functools.lru_cache(maxsize=1024)
def _layout_hash(layout: Layout) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([layout.boxes.cuts, layout.holders]))


def _read_mode(source: Source, entry: ArrayEntry, layout: Layout | None, count: int) -> ReadMode | None:
    """Returns how processes read an array together, or None if each process may as well read its own boxes.

    A few boxes are enough to estimate how many bytes would be read more than once, or in vain.
    """
    if not math.prod(entry.shape):
        return None
    if layout is None:
        return ReadMode(None, tuple(range(count)))
    times, _ = _holders(layout)
    some = sorted({0, len(layout.boxes) // 2, len(layout.boxes) - 1})
    size = dtypes.itemsize(entry.dtype)
    needed = size * sum(math.prod(box_shape(layout.boxes[n])) for n in some)
    waste = sum(_bytes_around(source, entry, layout.boxes[n], size) for n in some) / needed
    if times * (1 + waste) <= _MAX_REREAD_RATIO:
        return None
    if waste > _MAX_REREAD_RATIO - 1 and (how := _collective_mode(layout)):
        return how
    return ReadMode(layout, None) if times > 1 else None


def _collective_mode(layout: Layout) -> ReadMode | None:
    readers = _holders(layout)[1]
    return ReadMode(layout, readers) if 1 < len(readers) <= _MAX_RECEIVERS else None


@functools.lru_cache(maxsize=1024)
def _holders(layout: Layout) -> tuple[float, tuple[int, ...]]:
    """Returns how many processes hold a box of a layout on average, and all processes that hold any box."""
    readers = tuple(sorted(set(itertools.chain.from_iterable(set(layout.holders)))))
    return sum(map(len, layout.holders)) / len(layout.boxes), readers


def _bytes_around(source: Source, entry: ArrayEntry, box: Box, itemsize: int) -> int:
    """Returns about how many bytes outside a box are read with it.

    A piece that is entirely in the box adds none: pieces are assumed to follow each other in the file.
    """
    found = 0
    for _, piece in pieces(source, entry, box):
        inner = intersect(piece, box)
        if inner is None or inner == piece:
            continue
        within = tuple((a - first, b - first) for (a, b), (first, _) in zip(inner, piece, strict=True))
        for begin, end in byte_ranges(box_shape(piece), within, itemsize, _BLOCK_BYTES):
            found += end - begin + _BLOCK_BYTES
        found -= itemsize * math.prod(box_shape(inner))
    return found
