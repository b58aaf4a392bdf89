"""Does the next job in a thread while the caller works with the result of the last one."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ..errors import SaveError
from .latch import Latch
from .thread import Thread, lost_thread, start_threads

T = TypeVar("T")


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
