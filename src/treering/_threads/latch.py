"""Defines `Latch`, an event that happens once and that threads wait for."""

import contextlib
import threading
import time
from collections.abc import Callable

_MAX_WAIT_SECONDS = 0.5  # A waiting thread looks at the flag this often. An interrupt may have left the gate closed.


class Latch:
    """A `threading.Event` that still works after a ctrl-C at any point of its methods.

    `Event` is written in Python and has a lock inside. A ctrl-C just after a thread acquired that lock leaves it held
    for good, and every thread that then sets or awaits the event hangs.

    A latch has a flag, and a gate that wakes the waiting threads. The gate is a lock written in C: it is closed while
    the lock is held. `set` opens the gate. The gate lets one thread through and closes behind it, and that thread
    opens it for the next one. A ctrl-C between two of these steps may leave the gate closed, so waiting threads also
    look at the flag from time to time.

    is_lost: returns True once the thread that is to set the latch has ended. The latch then counts as set, so that no
        thread waits for it forever; those that waited find no result.
    """

    def __init__(self, is_lost: Callable[[], bool] | None = None) -> None:
        self._happened = False
        self.is_lost = is_lost
        self._gate = threading.Lock()
        self._gate.acquire()

    def is_set(self) -> bool:
        """Returns True if `set` was called, or no thread is left that could call it."""
        return self._happened or (self.is_lost is not None and self.is_lost())

    def set(self) -> None:
        """Sets the latch for good, and wakes the waiting threads."""
        self._happened = True
        self.is_lost = None  # frees what it refers to
        with contextlib.suppress(RuntimeError):  # raised if the gate is open already
            self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the latch is set, at most `timeout` seconds. Returns True if it is set."""
        end = None if timeout is None else time.monotonic() + timeout
        while not (self._happened or self.is_set()):
            left = _MAX_WAIT_SECONDS if end is None else min(_MAX_WAIT_SECONDS, end - time.monotonic())
            if left <= 0:
                return False
            if self._gate.acquire(timeout=left):  # Only `set` opens the gate.
                self.set()  # opens it for the next waiting thread
        return True
