"""Defines `Latch`, an event that happens once and that threads wait for."""

import contextlib
import threading
import time

_MAX_WAIT_SECONDS = 0.5  # A thread that was not woken by `set` notices it after this time at most.


class Latch:
    """A `threading.Event` that an interrupt at any moment cannot break.

    `Event` is written in Python. A ctrl-C right after it took its lock leaves the lock held, and every thread that sets
    or awaits the event hangs forever. Here a lock written in C wakes the waiting threads. A thread that it does not
    wake looks at the flag again after a moment.
    """

    def __init__(self) -> None:
        self._happened = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def is_set(self) -> bool:
        """Returns True if `set` was called."""
        return self._happened

    def set(self) -> None:
        """Sets the latch for good, and wakes the waiting threads."""
        self._happened = True
        self._open()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the latch is set, at most `timeout` seconds. Returns True if it is set."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._happened:
            left = _MAX_WAIT_SECONDS if end is None else min(_MAX_WAIT_SECONDS, end - time.monotonic())
            if left <= 0:
                break
            if self._gate.acquire(timeout=left):
                self._open()  # so that the next waiting thread wakes too
        return self._happened

    def _open(self) -> None:
        with contextlib.suppress(RuntimeError):  # raised if the gate is open already
            self._gate.release()
