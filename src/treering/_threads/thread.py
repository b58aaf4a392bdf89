"""Starts threads, and notices those that end without a sign.

A thread that starts while memory runs out can end with a `MemoryError` before it runs any code of its own. Nothing then
sets the event that other threads wait for, not even the one in `threading.Thread.start`.

A `Latch` is an event that happens once and that threads wait for.
"""

import _thread
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ..errors import SaveError

_MAX_WAIT_SECONDS = 0.5  # A waiting thread looks at the flag this often. An interrupt may have left the gate closed.
_POLL_SECONDS = 0.01  # between looks at a thread that starts


def if_free(lock: "threading.RLock", action: Callable[[], bool]) -> bool:
    """Returns the result of an action that holds a lock meanwhile; False, without waiting, if another thread has it.

    The lock is one that only its owner can release. So a ctrl-C right after `acquire` does not leave it held.
    """
    try:
        return lock.acquire(blocking=False) and action()
    finally:
        try:
            lock.release()
        except RuntimeError:  # Another thread has it.
            pass


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
        is_lost = self.is_lost  # read once, because another thread may set the latch
        return self._happened or (is_lost is not None and is_lost())

    def set(self) -> None:
        """Sets the latch for good, and wakes the waiting threads."""
        self._happened = True
        self.is_lost = None  # frees what it refers to
        with contextlib.suppress(RuntimeError):  # raised if the gate is open already
            self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the latch is set, at most `timeout` seconds. Returns True if it is set."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._happened:
            if (is_lost := self.is_lost) and is_lost():
                break
            left = _MAX_WAIT_SECONDS if end is None else min(_MAX_WAIT_SECONDS, end - time.monotonic())
            if left <= 0:
                return False
            if self._gate.acquire(timeout=left):  # Only `set` opens the gate.
                self.set()  # opens it for the next waiting thread
        return True


class Thread(threading.Thread):
    """A `threading.Thread` whose end shows in any case.

    Python refers to the method that a new thread calls first from nowhere but that thread, so a weak reference to the
    method ends with the thread. This needs no memory and no code of the thread.
    """

    has_begun = False  # True once the thread runs its target
    _life: "weakref.ref[Any] | None" = None  # None before the start

    @property
    def _bootstrap(self) -> Any:  # Python 3.11 to 3.14 call this in the new thread, and read it once.
        begin = super()._bootstrap  # type: ignore[misc]
        self._life = weakref.ref(begin)
        return begin

    def run(self) -> None:
        self.has_begun = True
        super().run()

    @property
    def has_ended(self) -> bool:
        """True once the thread was started and runs no more, for whatever reason."""
        return self._life is not None and self._life() is None

    @property
    def has_failed(self) -> bool:
        """True if the thread has ended before it ran its target."""
        return self.has_ended and not self.has_begun

    def is_alive(self) -> bool:
        return not self.has_ended and super().is_alive()

    def forget(self) -> None:
        """Frees what the thread was to do, which Python keeps for a thread that has failed.

        The thread that called `start` stays in it: the event that it waits for may be locked for good.
        """
        getattr(threading, "_limbo", {}).pop(self, None)
        self._target = self._args = self._kwargs = None

    @property
    def was_started(self) -> bool:
        """True once the thread runs its target, or is certain to."""
        return self._life is not None and not self.has_failed


def start_threads(*threads: Thread) -> None:
    """Starts threads, one after the other. After an interrupt some may start later or never, but none hangs.

    `Thread.start` waits in Python code. A ctrl-C right after it took a lock leaves the lock held; then the new thread
    waits for it forever, and so does the end of the program. So a helper thread calls it, which gets no interrupts.

    Raises `SaveError` if the system allows no more threads, or has no memory for them. Threads that were started by
    then run on.
    """
    outcome: list[BaseException | None] = [MemoryError()]  # Storing into it needs no memory.

    def work() -> None:
        try:
            for thread in threads:
                thread.start()
            outcome[0] = None
        except BaseException as error:
            outcome[0] = error
        finally:
            started.set()

    begin = functools.partial(work)  # Python 3.11 never frees a plain function that it lacks the memory to call.
    helper = weakref.ref(begin)  # ends with the helper thread
    started = Latch(lambda: helper() is None or any(thread.has_failed for thread in threads))
    try:
        _thread.start_new_thread(begin, ())
    except (RuntimeError, MemoryError) as error:
        raise _not_started(error) from error
    del begin
    while True:
        try:
            started.wait()
            # A thread may have been started although `Thread.start` has failed afterwards.
            if not outcome[0] or not any(thread.was_started and not thread.has_begun for thread in threads):
                break
            time.sleep(_POLL_SECONDS)
        except MemoryError:  # The threads may run, so the caller must not take them for failed.
            continue
    if (error := outcome[0]) and not all(thread.has_begun for thread in threads):
        for thread in threads:
            if thread.has_failed:
                thread.forget()
        if isinstance(error, RuntimeError | MemoryError):
            raise _not_started(error) from error
        raise error


def _not_started(error: RuntimeError | MemoryError) -> SaveError:
    if isinstance(error, MemoryError):
        return SaveError("expected to start a thread, found no memory for it; free memory, or raise its limit")
    return SaveError(
        f"expected to start a thread, found that no more are allowed here ({error}); see `ulimit -u` and the limit "
        "of the container or job (pids.max), or end other threads"
    )


def lost_thread(what: str) -> SaveError:
    """Returns the error for work whose thread has ended without a result or an error."""
    return SaveError(
        f"{what}: its thread ended without a result, as if no memory was left even for an error; free memory, or "
        "raise its limit"
    )
