"""The results of calls that continue in the background."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..._threads.thread import Thread, start_threads

T = TypeVar("T")


class AsyncResponse(Generic[T]):
    """Waits for a call that continues in the background. A program that ends finishes the call first."""

    def __init__(self, wait: Callable[[float | None], T]):
        self._wait = wait

    def result(self, timeout: float | None = None) -> T:
        """Waits, at most `timeout` seconds, and returns the result.

        Raises the error of the call, and `TimeoutError` if the call is not over yet; it then continues.
        """
        return self._wait(timeout)

    def on_complete(self, callback: Callable[[T], Any]) -> None:
        """Calls `callback` with the result, in another thread, once the call has succeeded."""
        start_threads(Thread(target=lambda: callback(self._wait(None)), name="treering-on-complete", daemon=True))
