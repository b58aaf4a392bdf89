"""Supplies the bytes of shards to the writer threads of a save.

The caller's thread stages shards in order. A writer takes a shard when it needs it, and says when it has used the
bytes. The caller's arrays are in use until `run` returns. After that they may change or be donated.
"""

import bisect
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .._core.boxes import box_shape
from .._threads.thread import Latch, Thread, lost_thread
from .devices import start_copies
from .leaves import LocalShard, host_bytes

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_log = logging.getLogger("treering")
_MAX_COPY_BYTES_PER_DEVICE = 256 << 20  # copied at a time for each device, if other processes of this host copy too
_COPIED_BYTES_PER_SECOND = 5e9  # from devices; the caller waits for the plan no longer than a copy would take
_MAX_WAIT_SECONDS = 0.5  # A writer that waits for a shard looks this often whether the save has failed.
_PUBLISH_BYTES = 4 << 20  # staged before the caller wakes the waiting writers


class StagedSupply:
    """Staged shards. At most `limit` bytes of copies are held at a time; a larger shard is staged alone.

    data: the arrays that hold the shards. StagedSupply empties the list.
    memory_ok: returns True if so many more bytes may be copied while other copies are held. It is called repeatedly,
        because other processes use the same memory.
    deferred: this many shards, the last ones, are probably not needed. So `run` stages them only after `plan_reads`, if
        they must be copied. It does not wait for that longer than copying them would take.
    """

    def __init__(
        self,
        shards: Sequence[LocalShard],
        data: list[Any],
        limit: int | None,
        memory_ok: Callable[[int], bool] | None = None,
        deferred: int = 0,
    ):
        self.shards, self._data = shards, data
        # Called with the number of bytes that were written
        self.on_progress: Callable[[int], None] = lambda nbytes: None
        self._limit, self._memory_ok = limit, memory_ok
        self._views: list[Any] = [None] * len(shards)
        self._has_warned = False  # of too little memory
        self._copies = True in [shard.needs_copy for shard in shards]
        self._remaining_bytes = [shard.nbytes for shard in shards]
        self._staged_count = self._held_bytes = 0
        self._skipped_shards: set[int] = set()
        self._lock = threading.RLock()  # used instead of `with` on the condition, which an interrupt may leave locked
        self._changed = threading.Condition(self._lock)  # only writer threads wait for it, as ctrl-C may break a wait
        self._room_freed = Latch()  # what the caller's thread waits for
        self._first_deferred = len(shards) - deferred
        self._planned = Latch()  # set by `plan_reads`
        self._error: BaseException | None = None
        self._writer: Thread | None = None
        # Set when everything is staged or the caller has to wait. Before that, running writer threads would only take
        # the interpreter from the caller, and training would wait longer.
        self.writers_needed = Latch()

    def watch(self, writer: Thread) -> None:
        """Lets `run` fail once the thread that saves has ended without calling `fail`."""
        self._writer = writer

    def run(self) -> None:
        """Stages every shard in the caller's thread. Returns early if the writers have failed."""
        try:
            if not self._stage_groups(0, self._first_deferred) or self._first_deferred == len(self.shards):
                return
            if self._copies:
                self.writers_needed.set()
                nbytes = sum(shard.nbytes for shard in self.shards[self._first_deferred :])
                self._planned.wait(nbytes / _COPIED_BYTES_PER_SECOND)
            self._stage_groups(self._first_deferred, len(self.shards))
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            if self._error:  # Shards that were not staged must not keep their arrays in memory.
                self._data[:] = [None] * len(self._data)
                self.clear()
            self.writers_needed.set()

    def take(self, numbers: Sequence[int]) -> list[Bytes]:
        """Waits for the first of some shards, and returns its bytes and those of the next ones that are staged already.

        Raises the error that `fail` was given.
        """
        views = self._take_views(numbers)
        try:
            return [
                np.frombuffer(view, np.uint8) if type(view) is memoryview else view.reshape(-1).view(np.uint8)
                for view in views
            ]
        except (BufferError, ValueError):  # raised for an array that is not in C order
            return [np.asarray(view).reshape(-1).view(np.uint8) for view in views]

    def take_arrays(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """Does what `take` does for shards with elements, but returns arrays of their dtypes and shapes."""
        parts = [(view, self.shards[n]) for n, view in zip(numbers, self._take_views(numbers), strict=False)]
        try:
            return [np.ndarray(box_shape(shard.box), shard.dtype, view) for view, shard in parts]
        except (BufferError, ValueError):  # as in `take`
            flat = [np.asarray(view).reshape(-1) for view, _ in parts]
            return [
                one.view(shard.dtype).reshape(box_shape(shard.box)) for one, (_, shard) in zip(flat, parts, strict=True)
            ]

    def _take_views(self, numbers: Sequence[int]) -> list[Any]:
        first = numbers[0]
        if first >= self._staged_count:
            with self._lock:
                while not self._changed.wait_for(lambda: first < self._staged_count or self._error, _MAX_WAIT_SECONDS):
                    pass  # Without memory, `fail` cannot notify this thread.
        staged = self._staged_count
        if max(numbers) >= staged:
            numbers = list(itertools.takewhile(lambda n: n < staged, numbers))
        views = [self._views[n] for n in numbers]
        self.check()  # This must follow the reading of `_views`, which may be cleared at any moment after a failure.
        return views

    def peek(self, n: int) -> Bytes:
        """Returns the bytes of shard `n`, even if it is not staged.

        A writer calls this when `writers_needed` is set, and before any `take`. Then the caller has staged everything
        or waits for room, so the arrays that are not staged have not changed. It must not be called for deferred
        shards, because the caller waits for the plan only a short time.
        """
        self.check()
        if n < self._staged_count:
            return self.take([n])[0]
        shard = self.shards[n]
        return host_bytes(shard, self._data[n]).reshape(-1).view(np.uint8)

    @property
    def is_limited(self) -> bool:
        """True if shards may wait for memory. Then writers must take them in order, and release one before the next.

        It may be asked when `peek` may be called.
        """
        has_limit = self._limit is not None or self._memory_ok is not None
        return self._copies and has_limit and self._staged_count < len(self.shards)

    def plan_reads(self, order: Sequence[int], nbytes: Sequence[int]) -> None:
        """Sets which shards the writers will take, in order, and how many bytes of each.

        It may be called when `peek` may be. Without this call, writers take all bytes of all shards in turn. For any
        other order of shards there is no limit, because writers might wait for a shard that has no room yet.
        """
        with self._lock:
            self._remaining_bytes = [0] * len(self.shards)
            for n, size in zip(order, nbytes, strict=True):
                self._remaining_bytes[n] += size
            self._skipped_shards = set(range(len(self.shards))).difference(order)
            for n in self._skipped_shards:
                if n < self._staged_count:
                    self._drop(n, self.shards[n])
            if list(order) != sorted(order):
                self._limit = self._memory_ok = None
            self._room_freed.set()
            self._changed.notify_all()
        self._planned.set()

    def _drop(self, n: int, shard: LocalShard) -> None:
        self._views[n] = None
        if shard.needs_copy:
            self._held_bytes -= shard.nbytes

    @property
    def nbytes(self) -> int:
        """The total number of bytes of all shards."""
        return sum([shard.nbytes for shard in self.shards])

    def release_bytes(self, numbers: Sequence[int], nbytes: Sequence[int]) -> None:
        """Notes that so many more bytes of some shards are no longer needed, and frees shards that are finished."""
        if not self._copies:
            return  # Views take no memory, so there is nothing to free.
        with self._lock:
            for n, size in zip(numbers, nbytes, strict=True):
                self._remaining_bytes[n] -= size
                if not self._remaining_bytes[n] and self.shards[n].needs_copy:
                    self._drop(n, self.shards[n])
                    self._room_freed.set()

    def fail(self, error: BaseException) -> None:
        """Stops the staging: the caller stages no more, and the writers' calls of `take` raise `error`."""
        self._error = self._error or error
        try:
            with self._lock:
                self._room_freed.set()
                self._changed.notify_all()
        finally:  # Without memory, threads cannot be notified.
            self.writers_needed.set()
            self._planned.set()

    @property
    def failed(self) -> bool:
        """True if `fail` was called."""
        return self._error is not None

    def check(self) -> None:
        """Raises the error that `fail` was given."""
        if self._error:
            raise self._error

    def clear(self) -> None:
        """Releases all bytes."""
        with self._lock:
            self._views = [None] * len(self.shards)  # a new list, because the caller may be writing into the old one

    def _stage_groups(self, begin: int, end: int) -> bool:
        """Stages the shards [begin, end). Returns False if the writers have failed."""
        for first, last in self._groups(begin, end):
            skipped = self._skipped_shards
            # Views take no memory.
            if self._copies and not self._reserve(self._cost(first, last, skipped)):
                return False
            self._stage(first, last, skipped)
        return True

    def _cost(self, first: int, last: int, skipped: Collection[int]) -> int:
        needed = (n for n in range(first, last) if n not in skipped)
        return sum([self.shards[n].nbytes for n in needed if self.shards[n].needs_copy])

    def _groups(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Returns runs of the shards [begin, end) whose copies fit the limit together.

        Their copies from devices run at the same time.
        """
        limit = self._limit  # read once, because `plan_reads` may remove it
        if self._memory_ok:
            portion = _MAX_COPY_BYTES_PER_DEVICE * jax.local_device_count()
            limit = portion if limit is None else min(limit, portion)
        if limit is None:
            return [(begin, end)]
        groups: list[tuple[int, int]] = []
        first, cost = begin, 0
        for n in range(begin, end):
            own = self.shards[n].nbytes if self.shards[n].needs_copy else 0
            if n > first and cost + own > limit:
                groups.append((first, n))
                first, cost = n, 0
            cost += own
        return [*groups, (first, end)]

    def _reserve(self, nbytes: int) -> bool:
        def fits() -> bool:
            if not (self._held_bytes and nbytes):
                return True
            within = self._limit is None or self._held_bytes + nbytes <= self._limit
            return within and (self._memory_ok is None or self._memory_ok(nbytes))

        while True:
            with self._lock:
                if fits() or self._error:
                    self._held_bytes += nbytes
                    return self._error is None
                room = self._room_freed = Latch(lambda: self._is_writer_lost)
            self._warn_of_wait()
            self.writers_needed.set()
            room.wait()
            if self._is_writer_lost:
                self.fail(lost_thread("expected staged arrays to be written"))

    @property
    def _is_writer_lost(self) -> bool:
        return self._writer is not None and self._writer.has_ended

    def _warn_of_wait(self) -> None:
        """Logs, once, that the call waits for memory although the caller has set no limit."""
        if self._memory_ok and not self._has_warned:
            self._has_warned = True
            with contextlib.suppress(Exception):  # A log handler of the user may raise anything.
                _log.warning(
                    "the call waits until copies that it holds are written, because copies may take a quarter of the "
                    "available memory and must leave an eighth of all memory free; memory_limit= sets another limit"
                )

    def _stage(self, first: int, last: int, skipped: Collection[int]) -> None:
        """Stages the shards [first, last). `skipped`: those for which no memory was reserved."""
        data, shards, unneeded = self._data, self.shards, self._skipped_shards
        on_host = start_copies([data[n] for n in range(first, last) if shards[n].needs_copy and n not in unneeded])
        for begin, end in self._publish_runs(first, last):
            if self._copies or unneeded:
                found = [None if n in unneeded else self._bytes(n, on_host) for n in range(begin, end)]
            else:
                found = _views(data[begin:end])
            self._views[begin:end] = found
            # Otherwise the state would stay on the device until it is written.
            data[begin:end] = [None] * (end - begin)
            del found  # Otherwise shards that a writer has finished would stay until the next ones are staged.
            with self._lock:
                # `plan_reads` drops only what is staged, so it may have left these.
                for n in self._skipped_shards.intersection(range(begin, end)).difference(skipped):
                    self._drop(n, shards[n])
                self._staged_count = end
                self._changed.notify_all()

    def _publish_runs(self, first: int, last: int) -> list[tuple[int, int]]:
        """Returns runs of the shards [first, last). The writers are notified after each run."""
        ends = list(itertools.accumulate([shard.nbytes for shard in self.shards[first:last]]))
        begin, written, runs = first, 0, list[tuple[int, int]]()
        while begin < last:
            end = min(first + bisect.bisect_left(ends, written + _PUBLISH_BYTES) + 1, last)
            runs.append((begin, end))
            begin, written = end, ends[end - first - 1]
        return runs

    def _bytes(self, n: int, on_host: Iterator[Any]) -> np.ndarray:
        """Returns shard `n` on the host, copied if necessary. `on_host` yields its copy from the device next."""
        shard, data = self.shards[n], self._data[n]
        return host_bytes(shard, data, next(on_host)) if shard.needs_copy else np.asarray(data)


def _views(arrays: list[Any]) -> list[Any]:
    """Returns views of the arrays' memory. While a view exists, JAX does not reuse the memory of a donated array."""
    try:
        # There may be thousands. A `memoryview` of a JAX array takes four fifths of the time of `asarray`.
        return [one if type(one) is np.ndarray else memoryview(one) for one in arrays]
    except (BufferError, TypeError, ValueError):  # raised for a dtype that only NumPy knows
        return list(map(np.asarray, arrays))
