"""An event that happens once and that threads wait for."""

import contextlib
import threading
import time

_MAX_WAIT_SECONDS = 0.5  # seconds; at most this long after `set` a waiter that missed it goes on


class Latch:
    """A `threading.Event` that an interrupt at any moment cannot break.

    `Event` is written in Python: ctrl-C right after it took its lock leaves the lock held, and every thread that sets
    or awaits the event hangs for ever. Here a lock written in C wakes the waiting threads, and none depends on it.
    """

    def __init__(self) -> None:
        self._happened = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def is_set(self) -> bool:
        """Whether `set` was called."""
        return self._happened

    def set(self) -> None:
        """Sets the latch for good, and wakes the waiting threads."""
        self._happened = True
        self._open()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the latch is set, at most `timeout` seconds; returns whether it is."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._happened:
            left = _MAX_WAIT_SECONDS if end is None else min(_MAX_WAIT_SECONDS, end - time.monotonic())
            if left <= 0:
                break
            if self._gate.acquire(timeout=left):
                self._open()
        return self._happened

    def _open(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is open already
            self._gate.release()
