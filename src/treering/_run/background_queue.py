"""A queue of background jobs, such as deletions and uploads, that run one after another."""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable

from .._threads.forks import free_in_children
from .._threads.thread import Thread, start_threads
from ..errors import SaveError

_log = logging.getLogger("treering")


class BackgroundQueue:
    """Runs queued jobs one after another in a thread that ends when the queue is empty. Errors are logged."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, Callable[[], object]]] = queue.SimpleQueue()
        self._lock = free_in_children(threading.Lock())
        self._thread: Thread | None = None

    def add(self, label: str, job: Callable[[], object]) -> None:
        """Queues the job `job`, which log messages call `label`."""
        with self._lock:
            self._queue.put((label, job))
            if self._thread is None or not self._thread.is_alive():  # A forked child has no threads.
                try:
                    self._start_thread()
                except SaveError:  # The interpreter is ending, or no more threads can start.
                    self._run_next()
                except BaseException:  # After an interrupt the thread may have begun or not: replace it.
                    self._start_thread()
                    raise
        if not threading.main_thread().is_alive() and self._thread is not threading.current_thread():
            self.wait()  # A function of `atexit` has begun it, and Python waits for no more threads.

    @property
    def busy(self) -> bool:
        """True if a job is running or queued."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Waits until all jobs are done. Does those that a thread has left, which ended without memory."""
        while (thread := self._thread) and thread.is_alive():
            thread.join()
        with contextlib.suppress(queue.Empty):
            while self._thread and self._thread.has_ended:
                self._run_next()

    def _start_thread(self) -> None:
        self._thread = Thread(target=self._run_jobs, name="treering-upkeep", daemon=False)
        start_threads(self._thread)

    def _run_jobs(self) -> None:
        while True:
            with self._lock:
                if self._thread is not threading.current_thread():
                    return  # An interrupt came while this thread started, so `add` has replaced it.
                if self._queue.empty():
                    self._thread = None
                    return
            self._run_next()

    def _run_next(self) -> None:
        label, job = self._queue.get_nowait()
        try:
            job()
        except BaseException:  # Also `sys.exit()` in a hook: the later jobs must still run.
            _log.exception("%s failed", label)
