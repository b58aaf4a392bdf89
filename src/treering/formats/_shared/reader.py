"""The common reader of foreign formats. It has the entries of a checkpoint, and arrays that can read their boxes."""

import datetime
import functools
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import xxhash

from ..._core import expansion
from ..._core.boxes import Box, box_shape, full_box, slice_boxes
from ..._core.dtypes import itemsize
from ..._core.entries import ArrayEntry, Entry, LostEntry, ValueEntry
from ..._core.skeleton import Skeleton
from ..._core.source import EVERYTHING, Problem, Share
from ..._threads.pool import in_parallel
from ...errors import CorruptError, UnsafeError
from ...stores.read_errors import ReplacedError, raise_if_momentary, reading
from ...stores.store import Store
from .extents import Runs, fill_mapped, fill_parts, fill_small

_CHECK_SLICE_BYTES = 64 << 20  # of an array that are checked at a time
_MAX_PARALLEL_OPENS = 16  # files, in stores with slow replies
_log = logging.getLogger("treering")
S = TypeVar("S")
T = TypeVar("T")


class Stored(Protocol):
    """An array in a file."""

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        """Reads a box in native byte order, into memory that the caller may change. Raises `CorruptError`.

        With `mmap` the result may be a view of a private mapping of the file.
        """
        ...

    def can_map(self) -> bool:
        """Returns True if the array is contiguous in a file that can safely be mapped."""
        ...


def attempt(read: Callable[[], T]) -> T | CorruptError:
    """Returns the result of `read`, or the `CorruptError` that it raises. Raises its other errors and `UnsafeError`."""
    try:
        return read()
    except UnsafeError:
        raise
    except CorruptError as error:
        return error


def attempts(store: Store, given: Sequence[S | CorruptError], read: Callable[[S], T]) -> list[T | CorruptError]:
    """Returns the result of `attempt` for each value, and each given error as it is.

    In a store with slow replies it works on several values at a time.
    """
    found: list[T | CorruptError] = [CorruptError("not read")] * len(given)

    def work(n: int) -> None:
        one = given[n]
        found[n] = one if isinstance(one, CorruptError) else attempt(lambda: read(one))

    in_parallel(list(range(len(given))), work, 1 if store.object_bytes is None else _MAX_PARALLEL_OPENS)
    return found


def check_file(store: Store, path: str, index: str) -> str:
    """Returns the path of a file that an index names. Raises `CorruptError` if the file is missing."""
    there = store.stat(path)
    if there is None or not there.is_file:
        raise CorruptError(f"{path}: expected the file that {os.path.basename(index)} names, found nothing")
    return path


class _LostArray:
    """The array of a `LostEntry`, which cannot be read; see `Stored`."""

    def __init__(self, why: Sequence[str]):
        self._reason = why

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        raise CorruptError("\n".join(self._reason))

    def can_map(self) -> bool:
        return False


class ForeignReader:
    """A checkpoint of a foreign format, see `treering.formats.Source`.

    arrays: the array of each `ArrayEntry`, by path. Lost entries need none.
    immutable: True if no program ever writes into the files in place. Only then they are mapped by default. Most
        libraries do: MLX, and `open(path, "wb")`.
    left_out: describes the contents of the checkpoint that this reader does not read. They are logged.
    """

    expands = False  # True for a format that compresses arrays
    has_checksums = False  # True if stored checksums cover every byte of the arrays

    positional = False
    ambiguous_dtypes: frozenset[str] = frozenset()

    def __init__(
        self,
        format: str,
        path: str,
        entries: Sequence[Entry],
        arrays: Mapping[str, Stored],
        *,
        skeleton: Skeleton | None = None,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Any = None,
        nbytes: int = 0,
        created: datetime.datetime | None = None,
        immutable: bool = False,
        numbers_are_arrays: bool = False,
        left_out: Sequence[str] = (),
    ):
        self.format, self.path = format, path
        self.entries: dict[str, Entry] = {entry.path: entry for entry in entries}
        if len(self.entries) != len(entries):
            twice = next(name for name, count in Counter(entry.path for entry in entries).items() if count > 1)
            raise CorruptError(f"{path}: two leaves have one path: {twice}")
        self.skeleton = skeleton
        self.step, self.metrics, self.metadata, self.nbytes = step, dict(metrics or {}), metadata, nbytes
        self.created = created
        lost = {path: _LostArray(entry.why) for path, entry in self.entries.items() if isinstance(entry, LostEntry)}
        self._arrays: Mapping[str, Stored] = {**arrays, **lost} if lost else arrays
        self.numbers_are_arrays = numbers_are_arrays
        self.left_out = left_out
        if left_out:
            _log.warning("%s: left out, because it cannot be read here: %s", path, ", ".join(left_out))
        self._immutable = immutable

    def check_present(self) -> None: ...

    @property
    def identity(self) -> str:
        """A checksum of the leaves and the size of the checkpoint. It does not depend on the values of the arrays.

        "" if the arrays are not plain bytes of files. Processes then cannot share the reading.
        """
        if {*map(type, self._arrays.values())} - {Runs}:
            return ""
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode([self.nbytes, *self.entries.values()]))

    def stored(self) -> Collection[Stored]:
        """Returns the arrays in their files."""
        return self._arrays.values()

    def sharding(self, entry: ArrayEntry) -> dict[str, Any] | None:
        return None

    def can_mmap(self, requested: bool | None) -> bool:
        return self._immutable and self._can_map if requested is None else requested

    @functools.cached_property
    def _can_map(self) -> bool:
        return all(array.can_map() for array in self._arrays.values())

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, mmap: bool | None = None
    ) -> list[np.ndarray]:
        expansion.check_memory(self, wanted, self.path)
        found: list[Any] = [None] * len(wanted)
        free = mmap is None and self._immutable
        every = self._can_map if free else bool(mmap)
        plain: list[tuple[int, Runs, Box]] = []  # plain bytes of files, which several threads may read
        views: list[tuple[int, Runs, Box]] = []
        for n, (entry, box) in enumerate(wanted):
            array = self._arrays[entry.path]
            adopted = every or (free and array.can_map())
            if type(array) is Runs:
                (views if adopted else plain).append((n, array, box))
            else:
                with reading(self.path):
                    found[n] = array.read(box, adopted)
        fill_mapped(views, found)
        plain += [one for one in views if found[one[0]] is None]  # These files cannot be mapped.
        copied = [(n, array, box, array.room(box)) for n, array, box in fill_small(plain, found)]
        parts = [part for _, array, box, memory in copied for part in fill_parts(array, memory, box)]
        in_parallel(parts, lambda part: part())
        for n, array, _, memory in copied:
            found[n] = array.made(memory)
        return found

    def problems(self, share: Share = EVERYTHING) -> Iterator[Problem]:
        lost: dict[str, list[str]] = {}
        for path, entry in self.entries.items():
            for why in entry.why if isinstance(entry, LostEntry) else ():
                lost.setdefault(why, []).append(path)
        for why, paths in lost.items():
            yield Problem(self.path, tuple(paths), None, why)
        arrays = [entry for entry in self.entries.values() if not isinstance(entry, ValueEntry | LostEntry)]
        # One extra byte per array makes sure that an empty array is also in the share of exactly one process.
        begin, end = share.of(sum(entry.nbytes + 1 for entry in arrays))
        at = 0
        for entry in arrays:
            for what in self._damage_of(entry, begin - at, end - at):
                yield Problem(self.path, (entry.path,), None, what)
            at += entry.nbytes + 1

    def _damage_of(self, entry: ArrayEntry, begin: int, end: int) -> Iterator[str]:
        """Reads the slices of an array that begin in a range of its bytes, and yields the problem of each."""
        size = itemsize(entry.dtype)
        boxes = slice_boxes(entry.shape, size, _CHECK_SLICE_BYTES)
        for box in beginning_within(begin, end, ((box, size * math.prod(box_shape(box))) for box in boxes)):
            try:
                self._arrays[entry.path].read(box, False)
            except (PermissionError, ReplacedError):  # These are facts about the user or another program, not damage.
                raise
            except (CorruptError, OSError) as error:
                raise_if_momentary(error)  # An error that may pass is not damage.
                part = "" if box == full_box(entry.shape) else ", ".join(f"{start}:{stop}" for start, stop in box)
                yield f"{error} (in [{part}])" if part else str(error)


def beginning_within(begin: int, end: int, parts: Iterable[tuple[T, int]]) -> Iterator[T]:
    """Yields those of consecutive parts that begin in the byte range [begin, end) of all parts together.

    parts: each part with its number of bytes.
    """
    at = 0
    for part, nbytes in parts:
        if begin <= at < end:
            yield part
        at += nbytes
