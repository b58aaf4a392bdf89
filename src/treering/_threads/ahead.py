"""Doing the next thing while the caller is busy with the one before."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ..errors import SaveError
from .latch import Latch
from .pool import start

T = TypeVar("T")


class Job:
    """Work that is done in a thread of its own, or where none can be started at once.

    `daemon`: a program that ends does not wait for it.
    """

    def __init__(self, work: Callable[[], Any], *, daemon: bool = False):
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self._done = Latch()
        try:
            start(threading.Thread(target=self._run, name="treering-ahead", daemon=daemon))
        except SaveError:
            self._run()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is done, at most `timeout` seconds; returns whether it is."""
        return self._done.wait(timeout)

    def result(self) -> Any:
        """What the work returned. Raises what it raised."""
        self._done.wait()
        if self._error:
            raise self._error
        return self._result


def ahead(jobs: Sequence[Callable[[], T]]) -> Iterator[T]:
    """The results of jobs, in order: while the caller works with one, the next job is done in a thread.

    Raises what a job raises, when its turn comes. When the caller stops early, no job goes on.
    """
    upcoming = Job(jobs[0]) if jobs else None
    try:
        for n in range(len(jobs)):
            assert upcoming
            result = upcoming.result()
            upcoming = Job(jobs[n + 1]) if n + 1 < len(jobs) else None
            yield result
            del result  # or the caller would hold two
    finally:
        if upcoming:
            upcoming.wait()
