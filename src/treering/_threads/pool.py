"""Starts threads, and defines a pool of threads that work on one task together.

The threads are plain ones and start early. Once the main thread has ended, Python refuses executors and new threads,
but a save that is running then must still finish. The threads are not daemons, so the interpreter waits for them, and
the code that makes a `ThreadPool` must close it.
"""

import _thread
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any

from ..errors import SaveError
from .latch import Latch

_MAX_READ_THREADS = 4  # reads in flight
_INLINE = 4  # jobs; up to so many are faster without a thread


def start_threads(*threads: threading.Thread) -> None:
    """Starts threads, one after the other. After an interrupt some may start later or never, but none hangs.

    `Thread.start` waits in Python code. A ctrl-C right after it took a lock leaves the lock held; then the new thread
    waits for it forever, and so does the end of the program. So a helper thread calls it, which gets no interrupts.

    Raises `SaveError` if the system allows no more threads.
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
    """A pool of `size` threads. The thread that calls `run` is one of them; the rest end after the `with` block."""

    def __init__(self, size: int, name: str = "treering"):
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{n}", daemon=False) for n in range(size - 1)]

    def start(self, *others: threading.Thread) -> None:
        """Starts `others`, then the threads of the pool. If the system allows no more, fewer threads do the work.

        Raises `SaveError` if not all of `others` can be started.
        """
        try:
            start_threads(*others, *self._threads)
        except SaveError:
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            if any(thread.ident is None for thread in others):
                raise

    def run(self, work: Callable[[], None]) -> None:
        """Calls `work()` in every thread at once, in the context of the caller. Returns when all threads are done.

        Raises the first error.
        """
        if self._closed:
            work()
            return
        errors: list[BaseException] = []
        # Written in C, so an interrupt leaves none of its locks held
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
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
            del task  # Otherwise its memory would stay until the next task arrives.


def in_parallel(jobs: list[Any], work: Callable[[Any], None], threads: int = _MAX_READ_THREADS) -> None:
    """Does all jobs in a few threads. Raises the first error, and then starts no more jobs."""
    if len(jobs) <= 1 or (threads == _MAX_READ_THREADS and len(jobs) <= _INLINE):
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
            rest = iter(())  # Only this thread gets an interrupt, so it has to stop the others.
