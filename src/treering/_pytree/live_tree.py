"""The hand-over of sources from the thread that calls save to the threads that write.

The caller puts sources in, in order; a writer takes a source when it needs it and says when its bytes are
copied out. Until `run` returns, the caller's arrays are in use; after that they may change or be donated.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .._threads.latch import Latch
from .leaves import Source, host_bytes

_PUBLISH = 4 << 20  # bytes after which waiting writers are told


class Feed:
    """At most `limit` bytes of copies are held at a time; a source larger than that passes alone."""

    def __init__(self, sources: Sequence[Source], limit: int | None):
        self.sources = sources
        self.moved: Callable[[int], None] = lambda nbytes: None  # told of what is written
        self._limit = limit
        self._views: list[Any] = [None] * len(sources)
        self._left = [source.nbytes for source in sources]
        self._fed = self._held = 0
        self._unneeded: set[int] = set()
        self._lock = threading.RLock()  # `with` on the condition itself may keep it when an interrupt comes
        self._changed = threading.Condition(self._lock)  # for the writers alone: ctrl-C may break a wait for it
        self._room = Latch()  # for which the caller waits
        self._error: BaseException | None = None
        # Set once everything is fed or the caller has to wait: until then writers would only take the
        # interpreter from it and lengthen its stall.
        self.writers_needed = Latch()

    def run(self) -> None:
        """Feeds every source; called by the thread that called save. Ends early when the writers have failed."""
        try:
            for first, last in self._groups():
                if not self._reserve(self._cost(first, last)):
                    return
                self._feed(first, last)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            if self._error:  # what was not handed over is not to be held either
                for source in self.sources:
                    source.data = None
                self.clear()
            self.writers_needed.set()

    def ready(self, n: int) -> bool:
        """Whether `take` would return at once."""
        return n < self._fed

    def take(self, n: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of source `n`; waits until they are there. Raises what `fail` was given."""
        if n >= self._fed:
            with self._lock:
                self._changed.wait_for(lambda: n < self._fed or self._error)
        view = self._views[n]
        self.check()  # after the look: a hand-over that failed is cleared at any moment
        return view.reshape(-1).view(np.uint8)

    def peek(self, n: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of source `n`, whether they are handed over or not.

        To be called when `writers_needed` is set and before anything is taken: then the caller is either through
        or waits for room, and its arrays still hold what they held.
        """
        self.check()
        if n < self._fed:
            return self.take(n)
        source = self.sources[n]
        return host_bytes(source, source.data).reshape(-1).view(np.uint8)

    def need(self, order: Sequence[int], nbytes: Sequence[int]) -> None:
        """Says which sources will be taken in which order, and how many bytes of each; to be called when `peek` may be.

        Without it, all bytes of all sources are taken in turn. In another order, none of them can wait for room.
        """
        with self._lock:
            self._left = [0] * len(self.sources)
            for n, size in zip(order, nbytes, strict=True):
                self._left[n] += size
            self._unneeded = set(range(len(self.sources))).difference(order)
            for n in self._unneeded:
                if n < self._fed:
                    self._drop(n, self.sources[n])
            if list(order) != sorted(order):
                self._limit = None
            self._room.set()
            self._changed.notify_all()

    def _drop(self, n: int, source: Source) -> None:
        self._views[n] = None
        if source.copies:
            self._held -= source.nbytes

    @property
    def nbytes(self) -> int:
        """How many bytes there are to hand over."""
        return sum(source.nbytes for source in self.sources)

    def copied(self, n: int, nbytes: int) -> None:
        """Says that so many bytes of source `n` are not needed any more."""
        if not self.sources[n].copies:
            return  # a view costs nothing
        with self._lock:
            self._left[n] -= nbytes
            if not self._left[n]:
                self._drop(n, self.sources[n])
                self._room.set()

    def fail(self, error: BaseException) -> None:
        """Ends the hand-over on both sides."""
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
            self._views = [None] * len(self.sources)  # the caller may be putting one in right now

    def _cost(self, first: int, last: int) -> int:
        return sum(source.nbytes for source in self.sources[first:last] if source.copies)

    def _groups(self) -> Iterator[tuple[int, int]]:
        """Runs of sources whose copies fit the limit together; their device copies are under way at once."""
        limit = self._limit  # `need` may lift it
        if limit is None:
            yield 0, len(self.sources)
            return
        first = cost = 0
        for n, source in enumerate(self.sources):
            own = source.nbytes if source.copies else 0
            if n > first and cost + own > limit:
                yield first, n
                first, cost = n, 0
            cost += own
        yield first, len(self.sources)

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

    def _feed(self, first: int, last: int) -> None:
        wanted = [n for n in range(first, last) if n not in self._unneeded]
        on_host = _start_copies([self.sources[n].data for n in wanted if self.sources[n].copies])
        unpublished = 0
        for n in range(first, last):
            source = self.sources[n]
            if n in self._unneeded:
                with self._lock:
                    source.data = None
                    self._drop(n, source)
                    self._fed = n + 1
                    self._changed.notify_all()
                continue
            self._views[n] = host_bytes(source, next(on_host)) if source.copies else np.asarray(source.data)
            source.data = None  # or the state of this step would stay in the device's memory until it is written
            unpublished += source.nbytes
            if unpublished >= _PUBLISH or n == last - 1:
                unpublished = 0
                with self._lock:
                    self._fed = n + 1
                    self._changed.notify_all()


def _start_copies(arrays: list[Any]) -> Iterator[Any]:
    """Begins all device-to-host copies at once, into pinned memory where the backend has it."""
    pinned = {n: where for n, a in enumerate(arrays) if isinstance(a, jax.Array) and (where := _pinned(a.sharding))}
    if pinned:
        moved = jax.device_put([arrays[n] for n in pinned], list(pinned.values()))
        for n, copy in zip(pinned, moved, strict=True):
            arrays[n] = copy
    for n, array in enumerate(arrays):
        if isinstance(array, jax.Array) and n not in pinned:
            array.copy_to_host_async()
    arrays.reverse()
    while arrays:
        yield arrays.pop()  # and let go of it: what was collected is not to be held twice


def _pinned(sharding: Any) -> Any:
    """The same sharding in pinned host memory; None on CPUs and where there is no such memory."""
    device = next(iter(sharding.device_set))
    if device.platform == "cpu" or all(memory.kind != "pinned_host" for memory in device.addressable_memories()):
        return None
    return sharding.with_memory_kind("pinned_host")
