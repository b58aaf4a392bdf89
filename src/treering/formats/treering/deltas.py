"""Arrays that are stored as their difference to the same leaf of an earlier checkpoint, the base.

In reinforcement learning a trainer publishes its weights after every step, and few of their elements differ from those
of the step before. The difference is sparse, by an idea of the delta formats of slime and SkyRL, which store the
exclusive or of all bytes. Positions and small integers take less: most elements change by one unit in the last place.

A difference has three parts, one after another, compressed together as one zstd frame:

- the gaps: for each changed element, the number of elements between it and the one before; first the lowest byte of
  each number, then the next byte of each, and so on (`gap` bytes);
- the changes: new minus old as an unsigned integer of the element's size, modulo its range, in zigzag form (0, -1, 1,
  -2, … become 0, 1, 2, 3, …), byte by byte in the same way.

An array without changes is stored as no bytes.

If several processes save an array, each stores the pieces that it writes, each as a difference by itself or as it is.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from ..._core import dtypes
from ..._core.boxes import Box, box_shape, full_box
from ..._core.entries import ArrayEntry
from ..._threads.pool import in_parallel
from ...errors import CorruptError
from ...stores.buffers import empty_aligned_array
from .._shared.zstd import unpack, zstandard
from . import manifest
from .manifest_fields import ArrayRow, Delta

_LEVEL = 1  # of zstd; more takes several times as long and saves 2 %
_MAX_SHARE = 4  # A difference in more than one of so many elements is not sparse: the array is stored as it is.
_HASH_LOG = 8  # of zstd's table of matches, of which positions and changes have few; a larger one costs time and bytes
# Bytes that are compared, or copied and changed, and then hashed at a time. They stay in the cache. With smaller blocks
# the threads wait for each other, because each begins the next piece of work in the interpreter.
_BLOCK_BYTES = 1 << 21
_ROUND = 1 << 14  # changes that are decoded at a time, for the same reason
_MAX_READ_BYTES = 32 << 20  # of differences that are in memory at a time, unless those of one array have more
_MAX_CHAIN = 10_000  # checkpoints, from one with deltas back to one that has the array itself


class Difference(NamedTuple):
    """The stored bytes of a difference. `changed` and `gap` are `count` and `gap` of `manifest_fields.Delta`.

    xxh3: the checksum of the new array; "" if it is that of the old one.
    """

    data: np.ndarray
    changed: int
    gap: Any
    xxh3: str = ""


class Part(NamedTuple):
    """An array that is stored as its difference to the base, or a piece of one.

    box: that of the piece; None for an array in one part.
    stored: the row of the stored bytes.
    delta: how they are a difference; None for a piece that is stored as it is.
    """

    box: Box | None
    stored: ArrayRow
    delta: Delta | None


def part_of(array: ArrayRow, box: Box, file: int, name: str, delta: Delta | None) -> Part:
    """Returns a piece of an array, which a file stores under a name."""
    if delta:
        return Part(box, ArrayRow(name, "numpy", "uint8", (delta.nbytes,), "", file), delta)
    return Part(box, ArrayRow(name, "numpy", array.dtype, box_shape(box), "", file), None)


class Version(Protocol):
    """An open checkpoint, as `read_arrays` needs it; see `read.Reader`."""

    @property
    def path(self) -> str: ...
    @property
    def identity(self) -> str: ...
    @property
    def entries(self) -> Mapping[str, Any]: ...
    @property
    def deltas(self) -> Mapping[str, Sequence[Part]]: ...
    @property
    def base(self) -> "Version": ...
    def read(self, wanted: Sequence[tuple[ArrayEntry, Box]]) -> list[np.ndarray]: ...
    def read_parts(self, parts: Sequence[Part]) -> list[np.ndarray]: ...
    def close_files(self) -> None: ...


NO_DIFFERENCE = Difference(np.zeros(0, np.uint8), 0, 1)


def checksum(array: np.ndarray) -> str:
    """Returns the checksum of the bytes of an array in C order."""
    return manifest.xxh3(_elements(array, 1))


def difference(new: np.ndarray, old: np.ndarray, itemsize: int) -> Difference | None:
    """Returns the difference of two arrays of bytes, or None if it would not be much smaller than the array.

    itemsize: the bytes of an element. Raises `UnsupportedError` without the package `zstandard`.
    """
    now, before = _elements(new, itemsize), _elements(old, itemsize)
    hasher, step = xxhash.xxh3_64(), _BLOCK_BYTES // now.itemsize
    gaps: list[np.ndarray] = []
    changes: list[np.ndarray] = []
    count, last = 0, -1
    for begin in range(0, now.size, step):
        block = now[begin : begin + step]
        places, changed = _changes(block, before[begin : begin + step])
        hasher.update(block.data)
        if not places.size:
            continue
        count += places.size
        if count * _MAX_SHARE > now.size:
            return None
        first, end = int(places[0]) + begin - last - 1, int(places[-1]) + begin
        places[1:] -= places[:-1] + 1
        places[0], last = first, end
        gaps.append(places.astype(f"<u{_bytes_of(int(places.max()))}"))
        changes.append(changed)
    if not count:
        return NO_DIFFERENCE
    gap = max(one.itemsize for one in gaps)
    planes = np.empty(count * (gap + now.itemsize), np.uint8)
    _split(np.concatenate(gaps), planes[: count * gap].reshape(gap, count))
    _split(_zigzag(np.concatenate(changes)), planes[count * gap :].reshape(now.itemsize, count))
    data = np.frombuffer(_compressor().compress(planes.data), np.uint8)
    return Difference(data, count, gap, hasher.hexdigest()) if data.size * 2 < new.nbytes else None


def _changes(now: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the places of the elements that differ, and new minus old for each.

    Few words of eight bytes have a difference, and only the elements of these are looked at one by one. NumPy finds
    the places of booleans faster than those of other numbers, and takes elements faster by an index than by `take`.
    """
    if now.nbytes % 8:
        places = np.flatnonzero(now != before)
        return places, now[places] - before[places]
    elements = 8 // now.itemsize
    new, old = now.view(np.uint64), before.view(np.uint64)
    words = np.flatnonzero(new != old)
    step = new[words].view(now.dtype) - old[words].view(now.dtype)
    if elements == 1:
        return words, step
    inside = np.flatnonzero(step != 0)
    words *= elements
    places = words[inside >> elements.bit_length() - 1]
    places += inside & elements - 1
    return places, step[inside]


def _bytes_of(number: int) -> int:
    return next(size for size in (1, 2, 4, 8) if number < 1 << 8 * size)


def _zigzag(changes: np.ndarray) -> np.ndarray:
    signed = changes.view(f"i{changes.itemsize}")
    return ((signed << 1) ^ (signed >> 8 * changes.itemsize - 1)).view(changes.dtype)


def _compressor() -> Any:
    package = zstandard()
    parameters = package.ZstdCompressionParameters.from_level(_LEVEL, hash_log=_HASH_LOG)
    return package.ZstdCompressor(compression_params=parameters)


def applied(
    old: np.ndarray, data: np.ndarray, delta: Delta, itemsize: int, hasher: xxhash.xxh3_64 | None = None
) -> np.ndarray:
    """Returns a new array of bytes: the old one with a difference. Without changes, returns the old one itself.

    hasher: is given the bytes of the result.

    Raises `CorruptError` for a difference that does not fit the array or its own description.
    """
    if not delta.count:
        if hasher:
            hasher.update(old.data)
        return old
    before = _elements(old, itemsize)
    count, gap, size = delta.count, delta.gap, before.itemsize
    if count > before.size:
        raise CorruptError(f"{count} of {before.size} elements are said to differ")
    planes = unpack(data, count * (gap + size))
    gaps, zigzag = planes[: count * gap].reshape(gap, count), planes[count * gap :].reshape(size, count)
    new = empty_aligned_array((old.nbytes,), np.dtype(np.uint8))
    elements, step = _elements(new, itemsize), _BLOCK_BYTES // size
    last, done = -1, 0
    for begin in range(0, count + 1, _ROUND):  # At `count` there is only the rest to copy.
        places = _joined(gaps[:, begin : begin + _ROUND], np.dtype(np.int64))
        if gap == 8 and places.size and (places.min() < 0 or places.max() >= before.size):  # The sum must not overflow.
            raise CorruptError("the difference has elements beyond the array")
        places += 1
        np.cumsum(places, out=places)
        places += last
        changes = _joined(zigzag[:, begin : begin + _ROUND], before.dtype)
        changes = (changes >> 1) ^ (-(changes & 1).view(f"i{size}")).view(changes.dtype)
        if places.size and (last := int(places[-1])) >= before.size:
            raise CorruptError("the difference has elements beyond the array")
        end = last + 1 if begin + _ROUND <= count else before.size
        ends = [*range(done + step, end, step), end]
        first = 0
        for stop, upto in zip(ends, places.searchsorted(ends).tolist(), strict=True):
            block = elements[done:stop]
            np.copyto(block, before[done:stop])
            elements[places[first:upto]] += changes[first:upto]
            if hasher:
                hasher.update(block.data)
            done, first = stop, upto
    return new


def read_arrays(
    reader: Version,
    paths: Collection[str],
    known: Mapping[str, np.ndarray] | None = None,
    known_identity: str = "",
) -> dict[str, np.ndarray]:
    """Returns complete arrays of a checkpoint with deltas, as arrays of bytes that nothing may change.

    known: the arrays of the checkpoint with `known_identity`, where the search for bases ends. An array that is still
        the same is the same object.

    Raises `CorruptError` if a base is missing or another than the one that was saved, and for other bytes than saved.
    """
    chain: list[tuple[Version, list[str]]] = []  # newest first, each with the arrays that it has as they are
    left, at = dict.fromkeys(paths), reader
    while left:
        if len(chain) == _MAX_CHAIN:
            raise CorruptError(f"{reader.path}: expected at most {_MAX_CHAIN} bases, one from another, found more")
        is_known = known is not None and at.identity == known_identity
        here = [path for path in left if is_known or path not in at.deltas]
        chain.append((at, here))
        for path in here:
            del left[path]
        at = at.base if left else at
    found: dict[str, np.ndarray] = {}
    for one, here in reversed(chain):
        changed = [path for path in found if path in one.deltas]
        for group in _groups(one, changed):
            stored = iter(one.read_parts([part for path in group for part in one.deltas[path]]))
            jobs = [(path, [(part, next(stored)) for part in one.deltas[path]]) for path in group]
            _map(jobs, functools.partial(_apply, one, reader, found))
            del stored, jobs
        if known is not None and one.identity == known_identity:
            found.update({path: known[path] for path in here if path in known})
            here = [path for path in here if path not in known]
        entries = [one.entries[path] for path in here]
        arrays = one.read([(entry, full_box(entry.shape)) for entry in entries if isinstance(entry, ArrayEntry)])
        for path, array in zip(here, arrays, strict=True):
            found[path] = _elements(array, 1)
        if one is not reader:  # There may be more bases than a process may open files.
            one.close_files()
    return found


def _groups(one: Version, paths: Sequence[str]) -> Iterator[list[str]]:
    """Yields the paths of arrays whose differences are read together, so that few of their bytes are in memory."""
    group, nbytes = list[str](), 0
    for path in paths:
        own = sum(part.stored.nbytes for part in one.deltas[path])
        if group and nbytes + own > _MAX_READ_BYTES:
            yield group
            group, nbytes = [], 0
        group.append(path)
        nbytes += own
    if group:
        yield group


def _apply(
    one: Version, reader: Version, found: dict[str, np.ndarray], job: tuple[str, Sequence[tuple[Part, np.ndarray]]]
) -> None:
    """Puts the new array in place of the old one at once, which nothing else may need."""
    found[job[0]] = _applied_to(one, reader, found, job)


def _applied_to(
    one: Version, reader: Version, found: Mapping[str, np.ndarray], job: tuple[str, Sequence[tuple[Part, np.ndarray]]]
) -> np.ndarray:
    path, parts = job
    entry, old = reader.entries[path], found[path]
    assert isinstance(entry, ArrayEntry)
    if old.nbytes != entry.nbytes:
        raise CorruptError(f"{one.path}: {path}: expected a base of {entry.nbytes} bytes, found {old.nbytes}")
    is_same = not any(part.delta is None or part.delta.count for part, _ in parts)
    is_result = one is reader  # The results of the bases are on the way to one, and need no check.
    if is_same and not is_result:
        return old
    new = old if is_same or parts[0][0].box is None else empty_aligned_array((old.nbytes,), np.dtype(np.uint8))
    for part, data in parts:
        try:
            made = _made(_piece(old, entry, part), part, data, dtypes.itemsize(entry.dtype), is_result)
        except CorruptError as error:
            raise CorruptError(f"{one.path}: {path}: {error}") from None
        if part.box is None:
            return old if is_same else made
        if not is_same:
            at = piece_of(new, entry, part.box)
            at[...] = made.view(at.dtype).reshape(at.shape)
    return new


def _made(old: np.ndarray, part: Part, data: np.ndarray, itemsize: int, is_result: bool) -> np.ndarray:
    """Returns the new bytes of a part. If they are a result, compares their checksum with the one that was saved."""
    if part.delta is None:
        return _elements(data, 1)
    hasher = xxhash.xxh3_64() if is_result and part.delta.xxh3 else None
    made = applied(old, data, part.delta, itemsize, hasher)
    if hasher and (have := hasher.hexdigest()) != part.delta.xxh3:
        raise CorruptError(
            f"expected an array with the checksum {part.delta.xxh3}, found {have} after its difference was applied; "
            "nothing of it is used"
        )
    return made


def piece_of(array: np.ndarray, entry: ArrayEntry, box: Box | None) -> np.ndarray:
    """Returns a view of a box of an array of bytes, with the dtype of its entry."""
    made = array.view(dtypes.to_numpy(entry.dtype)).reshape(entry.shape)
    return made if box is None else made[(*(slice(begin, end) for begin, end in box), ...)]


def _piece(array: np.ndarray, entry: ArrayEntry, part: Part) -> np.ndarray:
    return _elements(np.ascontiguousarray(piece_of(array, entry, part.box)), 1)


def _map(jobs: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
    results: list[Any] = [None] * len(jobs)

    def one(n: int) -> None:
        results[n] = work(jobs[n])

    in_parallel([*range(len(jobs))], one)
    return results


def _elements(array: np.ndarray, itemsize: int) -> np.ndarray:
    """Returns a view of the bytes of an array as unsigned integers."""
    size = itemsize if itemsize in (1, 2, 4) else 8 if itemsize % 8 == 0 else 1
    return array.reshape(-1).view(np.uint8).view(f"<u{size}")


def _split(numbers: np.ndarray, planes: np.ndarray) -> None:
    """Stores the lowest bytes of all numbers in the first plane, the next bytes in the next one, and so on."""
    for n, plane in enumerate(planes):
        np.copyto(plane, numbers >> 8 * n if n else numbers, casting="unsafe")


def _joined(planes: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Returns the numbers whose planes these are, one plane in each row. Most of the high bytes are 0."""
    numbers = planes[0].astype(dtype)
    for n, plane in enumerate(planes[1:], 1):
        if plane.any():
            numbers |= plane.astype(dtype) << 8 * n
    return numbers
