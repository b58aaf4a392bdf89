"""The supply of shards' bytes to the writer threads of a save.

The caller puts shards in, in order; a writer takes a shard when it needs it and says when its bytes are copied out.
Until `run` returns, the caller's arrays are in use; after that they may change or be donated.
"""

import bisect
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .._threads.latch import Latch
from .devices import start_copies
from .leaves import LocalShard, host_bytes

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_log = logging.getLogger("treering")
_PORTION_BYTES = 256 << 20  # bytes for each device that are copied at a time where others take memory here, too
_PUBLISH_BYTES = 4 << 20  # bytes that are staged before the caller wakes the waiting writers


class Staging:
    """Staged shards: at most `limit` bytes of copies are held at a time; a shard larger than that passes alone.

    data: the arrays that hold the shards; the list is emptied on the way.
    has_room: whether so many bytes more may be copied while others are held, asked again and again, for other processes
        take of the same memory.
    """

    def __init__(
        self,
        shards: Sequence[LocalShard],
        data: list[Any],
        limit: int | None,
        has_room: Callable[[int], bool] | None = None,
    ):
        self.shards, self._data = shards, data
        self.moved: Callable[[int], None] = lambda nbytes: None  # called with the bytes that are written
        self._limit, self._has_room = limit, has_room
        self._views: list[Any] = [None] * len(shards)
        self._told = False  # of too little room
        self._copies = True in [shard.copies for shard in shards]
        self._left = [shard.nbytes for shard in shards]
        self._staged = self._held = 0
        self._unneeded: set[int] = set()
        self._lock = threading.RLock()  # `with` on the condition itself may leave it held after an interrupt
        self._changed = threading.Condition(self._lock)  # only writer threads wait for it: ctrl-C may break a wait
        self._room = Latch()  # the caller waits for it
        self._error: BaseException | None = None
        # Set once everything is staged or the caller has to wait: until then the writer threads would only take
        # the interpreter from the caller and lengthen its stall.
        self.writers_needed = Latch()

    def run(self) -> None:
        """Stages every shard; called in the caller's thread. Returns early when the writers have failed."""
        try:
            for first, last in self._groups():
                if not self._reserve(self._cost(first, last)):
                    return
                self._stage(first, last)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            if self._error:  # shards that were not staged must not keep their arrays either
                self._data[:] = [None] * len(self._data)
                self.clear()
            self.writers_needed.set()

    def take(self, numbers: Sequence[int]) -> list[Bytes]:
        """The bytes of some shards: of the first, once that is staged, and of those after it up to one that is not yet.

        Raises what `fail` was given.
        """
        first = numbers[0]
        if first >= self._staged:
            with self._lock:
                self._changed.wait_for(lambda: first < self._staged or self._error)
        staged = self._staged
        if max(numbers) >= staged:
            numbers = list(itertools.takewhile(lambda n: n < staged, numbers))
        views = [self._views[n] for n in numbers]
        self.check()  # after `_views` is read: a staging that failed is cleared at any moment
        try:
            return [
                np.frombuffer(view, np.uint8) if type(view) is memoryview else view.reshape(-1).view(np.uint8)
                for view in views
            ]
        except (BufferError, ValueError):  # of an array that does not lie in C order
            return [np.asarray(view).reshape(-1).view(np.uint8) for view in views]

    def peek(self, n: int) -> Bytes:
        """The bytes of shard `n`, whether they are staged or not.

        Called with `writers_needed` set and before any `take`: then the caller has staged everything or waits for
        room, and the arrays that are not staged have not changed.
        """
        self.check()
        if n < self._staged:
            return self.take([n])[0]
        shard = self.shards[n]
        return host_bytes(shard, self._data[n]).reshape(-1).view(np.uint8)

    def need(self, order: Sequence[int], nbytes: Sequence[int]) -> None:
        """Says which shards the writers will take, in order, and how many bytes of each; called when `peek` may be.

        Without this call, all bytes of all shards are taken in turn. For any other order of shards the limit is lifted.
        """
        with self._lock:
            self._left = [0] * len(self.shards)
            for n, size in zip(order, nbytes, strict=True):
                self._left[n] += size
            self._unneeded = set(range(len(self.shards))).difference(order)
            for n in self._unneeded:
                if n < self._staged:
                    self._drop(n, self.shards[n])
            if list(order) != sorted(order):
                self._limit = self._has_room = None
            self._room.set()
            self._changed.notify_all()

    def _drop(self, n: int, shard: LocalShard) -> None:
        self._views[n] = None
        if shard.copies:
            self._held -= shard.nbytes

    @property
    def nbytes(self) -> int:
        """The number of bytes to stage."""
        return sum(shard.nbytes for shard in self.shards)

    def copied(self, numbers: Sequence[int], nbytes: Sequence[int]) -> None:
        """Says that so many bytes more of some shards are copied out and needed no longer."""
        if not self._copies:
            return  # a view costs nothing
        with self._lock:
            for n, size in zip(numbers, nbytes, strict=True):
                self._left[n] -= size
                if not self._left[n] and self.shards[n].copies:
                    self._drop(n, self.shards[n])
                    self._room.set()

    def fail(self, error: BaseException) -> None:
        """Ends the staging: the caller stops staging, and the writers' calls of `take` raise `error`."""
        with self._lock:
            self._error = self._error or error
            self._room.set()
            self._changed.notify_all()
        self.writers_needed.set()

    @property
    def failed(self) -> bool:
        """Whether `fail` was called."""
        return self._error is not None

    def check(self) -> None:
        """Raises what `fail` was given."""
        if self._error:
            raise self._error

    def clear(self) -> None:
        """Lets go of all bytes."""
        with self._lock:
            self._views = [None] * len(self.shards)  # the caller may be putting one in right now

    def _cost(self, first: int, last: int) -> int:
        return sum([shard.nbytes for shard in self.shards[first:last] if shard.copies]) if self._copies else 0

    def _groups(self) -> Iterator[tuple[int, int]]:
        """Runs of shards whose copies fit the limit together; their device copies are under way at once."""
        limit = self._limit  # `need` may lift it
        if self._has_room:
            portion = _PORTION_BYTES * jax.local_device_count()
            limit = portion if limit is None else min(limit, portion)
        if limit is None:
            yield 0, len(self.shards)
            return
        first = cost = 0
        for n, shard in enumerate(self.shards):
            own = shard.nbytes if shard.copies else 0
            if n > first and cost + own > limit:
                yield first, n
                first, cost = n, 0
            cost += own
        yield first, len(self.shards)

    def _reserve(self, nbytes: int) -> bool:
        def fits() -> bool:
            if not (self._held and nbytes):
                return True
            within = self._limit is None or self._held + nbytes <= self._limit
            return within and (self._has_room is None or self._has_room(nbytes))

        while True:
            with self._lock:
                if fits() or self._error:
                    self._held += nbytes
                    return self._error is None
                room = self._room = Latch()
            self._tell()
            self.writers_needed.set()
            room.wait()

    def _tell(self) -> None:
        """Logs, once, that the caller waits though the caller has set no limit."""
        if self._has_room and not self._told:
            self._told = True
            with contextlib.suppress(Exception):  # the error of a log handler
                _log.warning(
                    "the call waits until copies that it holds are written, or an eighth of the memory here would not "
                    "be left, or a quarter of what was available is taken; memory_limit= sets another limit"
                )

    def _stage(self, first: int, last: int) -> None:
        data, shards, unneeded = self._data, self.shards, self._unneeded
        on_host = start_copies([data[n] for n in range(first, last) if shards[n].copies and n not in unneeded])
        for begin, end in self._published(first, last):
            if self._copies or unneeded:
                found = [None if n in unneeded else self._bytes(n, on_host) for n in range(begin, end)]
            else:
                found = _views(data[begin:end])
            self._views[begin:end] = found
            data[begin:end] = [None] * (end - begin)  # or the state would stay on the device until it is written
            del found  # what a writer has done with is not held until the next ones are there
            with self._lock:
                for n in unneeded.intersection(range(begin, end)):
                    self._drop(n, shards[n])
                self._staged = end
                self._changed.notify_all()

    def _published(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Runs of the shards [first, last) after each of which the writers are told."""
        ends = list(itertools.accumulate([shard.nbytes for shard in self.shards[first:last]]))
        begin, written = first, 0
        while begin < last:
            end = min(first + bisect.bisect_left(ends, written + _PUBLISH_BYTES) + 1, last)
            yield begin, end
            begin, written = end, ends[end - first - 1]

    def _bytes(self, n: int, on_host: Iterator[Any]) -> np.ndarray:
        """Shard `n` on the host, copied if it must be; `on_host` has its copy next."""
        shard, data = self.shards[n], self._data[n]
        return host_bytes(shard, data, next(on_host)) if shard.copies else np.asarray(data)


def _views(arrays: list[Any]) -> list[Any]:
    """The memory of arrays, which the views keep from being donated: there may be thousands, in the caller's thread."""
    try:
        return list(map(memoryview, arrays))  # four fifths of the time
    except (BufferError, TypeError, ValueError):  # a dtype that only NumPy knows
        return list(map(np.asarray, arrays))
