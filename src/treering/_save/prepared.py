"""A save that is planned and has not begun."""

from collections.abc import Callable
from typing import NamedTuple

from .._core.source import Written
from .._pytree.on_demand import OnDemand, Supply
from .._threads.pool import ThreadPool


class Prepared(NamedTuple):
    """A save that is ready to begin: the caller runs `supply`, then the background calls `write`."""

    supply: Supply
    write: Callable[[ThreadPool], Written]


def releasing(reading: OnDemand, write: Callable[[ThreadPool], Written]) -> Callable[[ThreadPool], Written]:
    """Wraps `write`, which is called once, so that the caller waits no longer than that.

    The returned function keeps no reference to what was read.
    """
    once = [write]

    def write_and_release(pool: ThreadPool) -> Written:
        try:
            return once.pop()(pool)
        finally:
            reading.release()

    return write_and_release
