"""The supply of shards' bytes to the writer threads of a save.

The caller puts shards in, in order; a writer takes a shard when it needs it and says when its bytes are copied out.
Until `run` returns, the caller's arrays are in use; after that they may change or be donated.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .._threads.latch import Latch
from .devices import start_copies
from .leaves import LocalShard, host_bytes

_PUBLISH_BYTES = 4 << 20  # bytes that are staged before the caller wakes the waiting writers


class Staging:
    """Staged shards: at most `limit` bytes of copies are held at a time; a shard larger than that passes alone."""

    def __init__(self, shards: Sequence[LocalShard], limit: int | None):
        self.shards = shards
        self.moved: Callable[[int], None] = lambda nbytes: None  # called with the bytes that are written
        self._limit = limit
        self._views: list[Any] = [None] * len(shards)
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
                for shard in self.shards:
                    shard.data = None
                self.clear()
            self.writers_needed.set()

    def ready(self, n: int) -> bool:
        """Whether `take` would return at once."""
        return n < self._staged

    def take(self, n: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of shard `n`; waits until they are staged. Raises what `fail` was given."""
        if n >= self._staged:
            with self._lock:
                self._changed.wait_for(lambda: n < self._staged or self._error)
        view = self._views[n]
        self.check()  # after `_views` is read: a staging that failed is cleared at any moment
        return view.reshape(-1).view(np.uint8)

    def peek(self, n: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of shard `n`, whether they are staged or not.

        Called with `writers_needed` set and before any `take`: then the caller has staged everything or waits for
        room, and the arrays that are not staged have not changed.
        """
        self.check()
        if n < self._staged:
            return self.take(n)
        shard = self.shards[n]
        return host_bytes(shard, shard.data).reshape(-1).view(np.uint8)

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
                self._limit = None
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

    def copied(self, n: int, nbytes: int) -> None:
        """Says that `nbytes` bytes more of shard `n` are copied out and needed no longer."""
        if not self.shards[n].copies:
            return  # a view costs nothing
        with self._lock:
            self._left[n] -= nbytes
            if not self._left[n]:
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
        return sum(shard.nbytes for shard in self.shards[first:last] if shard.copies)

    def _groups(self) -> Iterator[tuple[int, int]]:
        """Runs of shards whose copies fit the limit together; their device copies are under way at once."""
        limit = self._limit  # `need` may lift it
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
            return not self._held or self._limit is None or self._held + nbytes <= self._limit

        while True:
            with self._lock:
                if fits() or self._error:
                    self._held += nbytes
                    return self._error is None
                room = self._room = Latch()
            self.writers_needed.set()
            room.wait()

    def _stage(self, first: int, last: int) -> None:
        wanted = [n for n in range(first, last) if n not in self._unneeded]
        on_host = start_copies([self.shards[n].data for n in wanted if self.shards[n].copies])
        unpublished = 0
        for n in range(first, last):
            shard = self.shards[n]
            if n in self._unneeded:
                with self._lock:
                    shard.data = None
                    self._drop(n, shard)
                    self._staged = n + 1
                    self._changed.notify_all()
                continue
            self._views[n] = host_bytes(shard, next(on_host)) if shard.copies else np.asarray(shard.data)
            shard.data = None  # or the state of this step would stay in the device's memory until it is written
            unpublished += shard.nbytes
            if unpublished >= _PUBLISH_BYTES or n == last - 1:
                unpublished = 0
                with self._lock:
                    self._staged = n + 1
                    self._changed.notify_all()
