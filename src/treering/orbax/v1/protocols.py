"""The protocols of objects that save themselves, and of handlers that save others."""

from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")
A = TypeVar("A")


class Checkpointable:
    """A part of a checkpoint that is saved and loaded by itself: a tree, an iterator, or an object of your own."""


class AbstractCheckpointable:
    """The form of a checkpointable that says how to load it."""


@runtime_checkable
class StatefulCheckpointable(Protocol):
    """An object that saves itself into a directory, and loads itself from one."""

    async def save(self, directory: Any) -> Awaitable[None]:
        """Saves the object. `await directory.await_creation()` returns the path."""
        ...

    async def load(self, directory: Any) -> Awaitable[None]:
        """Loads the object."""
        ...


class CheckpointableHandler(Protocol[T, A]):
    """Saves objects of a type into directories, and loads them. `register_handler` makes it known."""

    async def save(self, directory: Any, checkpointable: T) -> Awaitable[None]:
        """Saves an object. `await directory.await_creation()` returns the path. The result is awaited, too."""
        ...

    async def load(self, directory: Any, abstract_checkpointable: A | None = None) -> Awaitable[T]:
        """Loads an object. The result is awaited, too."""
        ...

    async def metadata(self, directory: Any) -> A:
        """Returns the abstract form of the object in a directory."""
        ...

    def is_handleable(self, checkpointable: Any) -> bool:
        """Returns True if the handler can save an object."""
        ...

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Returns True if the handler can load an object by its abstract form."""
        ...
