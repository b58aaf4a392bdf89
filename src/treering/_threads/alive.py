"""Objects that still exist, for those who must reach all of them: after a fork, or at the next claim of a run."""

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class Alive(Generic[T]):
    """A weak set that threads may go through while others add to it, which breaks the iteration of a `WeakSet`."""

    def __init__(self) -> None:
        self._by_id: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def add(self, one: T) -> None:
        """Adds an object, until it is collected."""
        self._by_id[id(one)] = one

    def all(self) -> list[T]:
        """The objects of this moment."""
        return [one for ref in self._by_id.valuerefs() if (one := ref()) is not None]
