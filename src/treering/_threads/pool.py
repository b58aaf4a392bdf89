"""Defines a pool of threads that work on one task together.

The threads are plain ones and start early. Once the main thread has ended, Python refuses executors and new threads,
but a save that is running then must still finish. The threads are not daemons, so the interpreter waits for them, and
the code that makes a `ThreadPool` must close it.
"""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ..errors import SaveError
from .thread import Latch, Thread, lost_thread, start_threads

_MAX_READ_THREADS = 4  # reads in flight
_INLINE = 4  # jobs; up to so many are faster without a thread
_WORKER_POLL_SECONDS = 2.0  # after which a worker without work looks whether its pool has an owner
_LOST_POLL_SECONDS = 0.5  # after which a thread that waits for the workers looks whether one has ended
T = TypeVar("T")


class _Share:
    """The part of one worker in a task."""

    def __init__(self, work: Callable[[], None], worker: Thread):
        self._work = work
        self.is_given = self.has_returned = False
        self.over = Latch(lambda: worker.has_ended)

    def do(self) -> None:
        """Does the work."""
        try:
            self._work()
            self.has_returned = True
        finally:
            self.over.set()


class _Worker(Thread):
    """A thread of a pool. A lock wakes it, because that needs no memory."""

    def __init__(self, pool: "ThreadPool", name: str):
        super().__init__(target=self._do_shares, args=(pool,), name=name, daemon=False)
        self._asleep = threading.Lock()
        self._asleep.acquire()
        self._share: _Share | None = None

    def give(self, share: _Share) -> None:
        """Lets the worker do its share."""
        share.is_given = True
        self._share = share
        self.wake()

    def wake(self) -> None:
        """Lets the worker look for a share, or for the end of its pool."""
        with contextlib.suppress(RuntimeError):  # It is awake.
            self._asleep.release()

    def _do_shares(self, pool: "ThreadPool") -> None:
        while True:
            self._asleep.acquire(timeout=_WORKER_POLL_SECONDS)
            share, self._share = self._share, None
            if share is not None:
                share.do()
            elif pool.is_over:
                return
            del share  # Otherwise its memory would stay until the next task arrives.


class ThreadPool:
    """A pool of `size` threads. The thread that calls `run` is one of them; the rest end after `close`.

    They also end if the owner of the pool has ended: the first thread that `start` is given, else its caller.
    """

    def __init__(self, size: int, name: str = "treering"):
        self._closed = False
        self._owner: threading.Thread | None = None
        self._workers = [_Worker(self, f"{name}-{n}") for n in range(size - 1)]

    def start(self, *others: Thread) -> None:
        """Starts `others`, then the threads of the pool. If the system allows no more, fewer threads do the work.

        Raises `SaveError` if not all of `others` can be started.
        """
        self._owner = others[0] if others else threading.current_thread()
        try:
            start_threads(*others, *self._workers)
        except SaveError:
            self._workers = [worker for worker in self._workers if worker.was_started]
            if not all(thread.was_started for thread in others):
                raise

    @property
    def is_over(self) -> bool:
        """True if no more tasks can come."""
        return self._closed or self._owner is None or not self._owner.is_alive()

    def run(self, work: Callable[[], None], stop: Callable[[BaseException], object] = lambda error: None) -> None:
        """Calls `work()` in every thread at once, in the context of the caller. Returns when all threads are done.

        Raises the first error. `stop` is called with an error at once, so that no thread waits for the one that failed.
        """
        if self._closed:
            work()
            return
        context = contextvars.copy_context()
        first_error: list[BaseException | None] = [None]  # Storing into it needs no memory.

        def guarded() -> None:
            try:
                context.copy().run(work)
            except BaseException as error:
                first_error[0] = first_error[0] or error
                stop(error)

        shares = [_Share(guarded, worker) for worker in self._workers]
        try:
            for worker, share in zip(self._workers, shares, strict=True):
                worker.give(share)
            guarded()
        finally:
            _wait_for(shares, stop, first_error)
        if first_error[0]:
            raise first_error[0]

    def close(self) -> None:
        """Lets the threads end."""
        self._closed = True
        for worker in self._workers:
            worker.wake()


def _wait_for(
    shares: Sequence[_Share], stop: Callable[[BaseException], object], first_error: list[BaseException | None]
) -> None:
    """Waits until no worker uses the files and the memory of a task any more, even if no memory is left."""
    waiting = [share for share in shares if share.is_given]
    while waiting:
        try:
            waiting[0].over.wait(_LOST_POLL_SECONDS)
            if any(share.over.is_set() and not share.has_returned for share in shares):
                first_error[0] = first_error[0] or lost_thread("expected a worker to do its share")
                stop(first_error[0])
            waiting = [share for share in waiting if not share.over.is_set()]
        except MemoryError:
            continue


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

    with contextlib.closing(ThreadPool(min(threads, len(jobs)), "treering-read")) as pool:
        try:
            pool.start()
            pool.run(loop)
        finally:
            rest = iter(())  # Only this thread gets an interrupt, so it has to stop the others.


class Task:
    """Work in a thread of its own. If the system allows no more threads, it is done at once in the calling thread.

    daemon: True if a program that ends does not wait for the work.
    """

    def __init__(self, work: Callable[[], Any], *, daemon: bool = False):
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self._is_over = False  # True once there is a result or an error
        thread = Thread(target=self._run, name="treering-ahead", daemon=daemon)
        self._done = Latch()
        try:
            start_threads(thread)
        except SaveError:
            self._run()
        else:
            self._done.is_lost = lambda: thread.has_ended

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        self._is_over = True
        self._done.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the work is done, at most `timeout` seconds. Returns True if it is done."""
        return self._done.wait(timeout)

    def result(self) -> Any:
        """Waits for the work, and returns its result or raises its error."""
        self._done.wait()
        if self._error:
            raise self._error
        if not self._is_over:
            raise lost_thread("expected the result of a read or a request")
        return self._result


def prefetch(jobs: Sequence[Callable[[], T]]) -> Iterator[T]:
    """Yields the results of jobs, in order. While the caller works with one, a thread does the next job.

    The error of a job is raised when its turn comes. If the caller stops early, no job is left running.
    """
    upcoming = Task(jobs[0]) if jobs else None
    try:
        for n in range(len(jobs)):
            assert upcoming
            result = upcoming.result()
            upcoming = Task(jobs[n + 1]) if n + 1 < len(jobs) else None
            yield result
            del result  # Otherwise two results would be in memory while the next one is awaited.
    finally:
        if upcoming:
            upcoming.wait()
