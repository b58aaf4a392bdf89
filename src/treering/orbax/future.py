"""The namespace `future` of Orbax: what handlers of your own return from `async_save`."""

import concurrent.futures
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from .namespaces import lacks, lookup

__getattr__ = lookup("future")


class Future(Protocol):
    """The protocol of futures."""

    def result(self, timeout: float | None = None) -> Any:
        """Waits, and returns the result. Raises the error of the work."""
        ...


@lacks("cancel")
class NoopFuture:
    """A future of no work."""

    def result(self, timeout: float | None = None) -> Any:
        """Returns None."""
        return None


@lacks("cancel")
class ChainedFuture:
    """A future that waits for others, and then calls a function."""

    def __init__(self, futures: Sequence[Future], cb: Callable[[], None]):
        self._futures, self._call = futures, cb

    def result(self, timeout: float | None = None) -> Any:
        """Waits at most `timeout` seconds for each future. Returns None."""
        for future in self._futures:
            future.result(timeout)
        self._call()


@lacks("cancel")
class CommitFutureAwaitingContractedSignals:
    """Runs a coroutine in a thread of its own. The adapter makes the directory first, so there is nothing to await.

    The options of Orbax have no effect.
    """

    def __init__(self, coro: Coroutine[Any, Any, Any], **options: Any):
        import asyncio

        thread = concurrent.futures.ThreadPoolExecutor(1)
        self._done = thread.submit(asyncio.run, coro)
        thread.shutdown(wait=False)

    def result(self, timeout: float | None = None) -> Any:
        """Waits, and returns the result of the coroutine. Raises its error."""
        return self._done.result(timeout)
