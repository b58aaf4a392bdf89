"""Starting threads, and a pool of them that work on one task together.

Plain threads, started early: Python refuses both executors and new threads once the main thread has
ended, and a save that is under way then must still finish. They are not daemons, so the interpreter waits
for them; the code that makes a `ThreadPool` must close it.
"""

import _thread
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any

from ..errors import SaveError
from .latch import Latch

_READERS = 4  # reads in flight
_INLINE = 4  # jobs; fewer are not worth a thread


def start(*threads: threading.Thread) -> None:
    """Starts threads, one after the other. After an interrupt some may begin later, or never; none hangs.

    Raises `SaveError` when the system allows no more of them.

    `Thread.start` waits in Python code: ctrl-C right after it took a lock leaves the lock held, and the new thread
    waits for it for ever, and so does the end of the program. Here a helper thread, which gets no interrupts, calls it.
    """
    errors: list[BaseException] = []
    started = Latch()

    def work() -> None:
        try:
            for thread in threads:
                thread.start()
        except BaseException as error:
            errors.append(error)
        finally:
            started.set()

    try:
        _thread.start_new_thread(work, ())
        started.wait()
        if errors:
            raise errors[0]
    except RuntimeError as error:
        raise SaveError(
            f"expected to start a thread, found that no more are allowed here ({error}); see `ulimit -u` and the limit "
            "of the container or job (pids.max), or end other threads"
        ) from error


class ThreadPool:
    """A pool of `size` threads, including the one that calls `run`; the others end after the `with` block."""

    def __init__(self, size: int, name: str = "treering"):
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{n}", daemon=False) for n in range(size - 1)]

    def start(self, *others: threading.Thread) -> None:
        """Starts `others`, then the threads of the pool. Where the system allows no more, fewer threads do the work.

        Raises `SaveError` when not all of `others` can be started.
        """
        try:
            start(*others, *self._threads)
        except SaveError:
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            if any(thread.ident is None for thread in others):
                raise

    def run(self, work: Callable[[], None]) -> None:
        """Calls `work()` in every thread at once, in the context of the caller; returns when all are done.

        Raises the first error.
        """
        if self._closed:
            work()
            return
        errors: list[BaseException] = []
        done: queue.SimpleQueue[None] = queue.SimpleQueue()  # in C: an interrupt leaves no lock of it held
        context = contextvars.copy_context()

        def guarded() -> None:
            try:
                context.copy().run(work)
            except BaseException as error:
                errors.append(error)
            finally:
                done.put(None)

        for _ in self._threads:
            self._tasks.put(guarded)
        guarded()
        for _ in range(len(self._threads) + 1):
            done.get()
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Lets the threads end."""
        self._closed = True
        for _ in self._threads:
            self._tasks.put(None)

    def __enter__(self) -> "ThreadPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while task := self._tasks.get():
            task()
            del task  # or its memory would stay until the next one comes


def in_parallel(jobs: list[Any], work: Callable[[Any], None], threads: int = _READERS) -> None:
    """Does all jobs in a few threads. Raises the first error; jobs that are not begun by then are not done."""
    if len(jobs) <= 1 or (threads == _READERS and len(jobs) <= _INLINE):
        for job in jobs:
            work(job)
        return
    rest = iter(jobs)
    turn = threading.Lock()

    def loop() -> None:
        nonlocal rest
        while True:
            with turn:
                job = next(rest, None)
            if job is None:
                return
            try:
                work(job)
            except BaseException:
                rest = iter(())  # the other threads begin no more jobs
                raise

    with ThreadPool(min(threads, len(jobs)), "treering-read") as pool:
        try:
            pool.start()
            pool.run(loop)
        finally:
            rest = iter(())  # after an interrupt as well, which this thread alone gets
