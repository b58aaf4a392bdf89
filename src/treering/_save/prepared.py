"""The plan of a save that has not begun."""

from collections.abc import Callable
from typing import NamedTuple

from .._core.source import Written
from .._pytree.lazy_supply import LazySupply, ShardSupply
from .._threads.pool import ThreadPool


class Prepared(NamedTuple):
    """A save that is ready to begin: the caller runs `supply`, then the background calls `write`."""

    supply: ShardSupply
    write: Callable[[ThreadPool], Written]


def releasing(reading: LazySupply, write: Callable[[ThreadPool], Written]) -> Callable[[ThreadPool], Written]:
    """Wraps `write`, which is called once, so that `reading` is released when it ends, also by an error.

    A caller that waits until the tree is read returns then.
    """
    once = [write]  # A list, so that calling `write` drops the reference to it and to the arrays that it holds.

    def write_and_release(pool: ThreadPool) -> Written:
        try:
            return once.pop()(pool)
        finally:
            reading.release_caller()

    return write_and_release
