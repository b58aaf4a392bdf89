"""Starts threads, and notices those that end without a sign.

A thread that starts while memory runs out can end with a `MemoryError` before it runs any code of its own. Nothing then
sets the event that other threads wait for, not even the one in `threading.Thread.start`.
"""

import _thread
import functools
import threading
import time
import weakref
from typing import Any

from ..errors import SaveError
from .latch import Latch

_POLL_SECONDS = 0.01  # between looks at a thread that starts


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
