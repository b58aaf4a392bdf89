"""Something that happens once, for which threads wait."""

import contextlib
import threading
import time

_MAX_WAIT_SECONDS = 0.5  # seconds; longer than that nobody waits who need not


class Latch:
    """What `threading.Event` is for, and an interrupt at any moment does no harm.

    `Event` is Python: where ctrl-C comes in the moment after it took its lock, it keeps it, and whoever sets it or
    waits for it hangs for ever. Here a lock of C wakes those who wait, and nobody relies on it.
    """

    def __init__(self) -> None:
        self._happened = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._happened

    def set(self) -> None:
        """It has happened."""
        self._happened = True
        self._open()

    def wait(self, timeout: float | None = None) -> bool:
        """Returns when it has happened, or after so many seconds; whether it has."""
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
