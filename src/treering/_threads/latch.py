"""Defines `Latch`, an event that happens once and that threads wait for."""

import contextlib
import threading
import time

_MAX_WAIT_SECONDS = 0.5  # A waiting thread looks at the flag this often. An interrupt may have left the gate closed.


class Latch:
    """A `threading.Event` that still works after a ctrl-C at any point of its methods.

    `Event` is written in Python and has a lock inside. A ctrl-C just after a thread acquired that lock leaves it held
    for good, and every thread that then sets or awaits the event hangs.

    A latch has a flag, and a gate that wakes the waiting threads. The gate is a lock written in C: it is closed while
    the lock is held. `set` opens the gate. The gate lets one thread through and closes behind it, and that thread
    opens it for the next one. A ctrl-C between two of these steps may leave the gate closed, so waiting threads also
    look at the flag from time to time.
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
        self._open_gate()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the latch is set, at most `timeout` seconds. Returns True if it is set."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._happened:
            left = _MAX_WAIT_SECONDS if end is None else min(_MAX_WAIT_SECONDS, end - time.monotonic())
            if left <= 0:
                break
            if self._gate.acquire(timeout=left):
                self._open_gate()  # for the next waiting thread
        return self._happened

    def _open_gate(self) -> None:
        with contextlib.suppress(RuntimeError):  # raised if the gate is open already
            self._gate.release()
