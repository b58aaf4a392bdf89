"""Keeps track of objects that still exist, so that code such as fork handlers can reach all of them."""

import weakref
from typing import Generic, TypeVar

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
