"""What a forked child must not inherit: locks that other threads hold, and libraries that need threads.

A fork copies only the thread that makes it. A lock that another thread held then would stay held in the child for good.
Data loaders fork their workers at any moment of a save. What else a child must leave to its parent (saves, leases,
sockets, signal handlers) is undone by the modules that have it.
"""

import os
import weakref
from typing import Any, Generic, TypeVar

from ..errors import UnsupportedError

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """A weak set that threads may iterate over while other threads add to it. That would break a `WeakSet`."""

    def __init__(self) -> None:
        self._by_id: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def add(self, item: T) -> None:
        """Adds an object. It stays in the set until it is collected."""
        self._by_id[id(item)] = item

    def all(self) -> list[T]:
        """Returns the objects that exist now."""
        return [item for ref in self._by_id.valuerefs() if (item := ref()) is not None]


_locks: WeakRegistry[Any] = WeakRegistry()


def free_in_children(lock: T) -> T:
    """Returns a `threading.Lock` or `RLock` that no thread holds in a forked child.

    Locks of what ends with one call need none of this, because the call does not continue in the child.
    """
    _locks.add(lock)
    return lock


class UnforkableLibrary:
    """A library whose threads a forked child lacks: it would wait for them forever, or end at once."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._first_process: int | None = None

    def check(self) -> None:
        """Call it before each use. Raises `UnsupportedError` if a parent of this process has used the library."""
        self._first_process = self._first_process or os.getpid()
        if self._first_process != os.getpid():
            raise UnsupportedError(
                f"{self._what} cannot be used in a process that was forked from one that has used them: start it with "
                "multiprocessing's method 'spawn' or 'forkserver'"
            )


def _free_locks() -> None:
    for lock in _locks.all():
        lock._at_fork_reinit()  # as Python's own modules do; private, but there since Python 3.9


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_locks)
