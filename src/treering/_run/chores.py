"""Jobs around the saves of a run, done one after another in the background."""

import logging
import queue
import threading
from collections.abc import Callable

from .._threads.pool import start
from ..errors import SaveError

_log = logging.getLogger("treering")


class Chores:
    """Does one job after another in a thread that ends when none is left; errors are logged."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, Callable[[], object]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, what: str, do: Callable[[], object]) -> None:
        """Queues a job."""
        with self._lock:
            self._queue.put((what, do))
            if self._thread is None or not self._thread.is_alive():  # a forked child has no threads of its parent's
                try:
                    self._begin()
                except SaveError:  # the interpreter is about to end, or the system starts no more threads
                    self._do_next()
                except BaseException:  # an interrupt: that thread may have begun or not, and a new one replaces it
                    self._begin()
                    raise

    @property
    def busy(self) -> bool:
        """Whether a job is under way or queued."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Returns when all jobs are done."""
        while (thread := self._thread) and thread.is_alive():
            thread.join()

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._work, name="treering-upkeep", daemon=False)
        start(self._thread)

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._thread is not threading.current_thread():
                    return  # an interrupt came while this thread was started, and another has replaced it
                if self._queue.empty():
                    self._thread = None
                    return
            self._do_next()

    def _do_next(self) -> None:
        what, do = self._queue.get()
        try:
            do()
        except BaseException:  # `sys.exit()` in a hook as well: the jobs after it are still to be done
            _log.exception("%s failed", what)
