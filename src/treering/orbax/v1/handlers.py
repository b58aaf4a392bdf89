"""Handlers of checkpointables; the namespace `handlers` of version 1."""

import json
from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar, runtime_checkable

from ..unsupported import refused
from .registry import (
    CheckpointableHandlerRegistry,
    global_registry,
    local_registry,
    register_handler,
)

__all__ = [
    "AbstractCheckpointable",
    "Checkpointable",
    "CheckpointableHandler",
    "CheckpointableHandlerRegistry",
    "JsonHandler",
    "ProtoHandler",
    "PyTreeHandler",
    "StatefulCheckpointable",
    "global_registry",
    "local_registry",
    "register_handler",
]

T = TypeVar("T")
A = TypeVar("A")
ProtoHandler = refused("v1.handlers.ProtoHandler")


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


class PyTreeHandler:
    """Saves trees, as `save` does. The leaves of other types that `leaf_handler_registry` adds are not supported."""

    def __init__(self, context: Any = None, *, leaf_handler_registry: Any = None, **options: Any):
        from ..unsupported import error

        if leaf_handler_registry is not None or options:
            raise error(f"v1.handlers.PyTreeHandler({', '.join(['leaf_handler_registry', *options])})")
        self._context = context

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        from . import saving

        path = await directory.await_creation()
        return _awaitable(saving.save_tree_at(path, checkpointable, self._context))

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        from . import loading

        return _awaitable(loading.load_at(directory, None, abstract_checkpointable, self._context))

    async def metadata(self, directory: Any) -> Any:
        from . import describing

        return describing.metadata(directory, None).metadata

    def is_handleable(self, checkpointable: Any) -> bool:
        from .trees import unsupported_leaf

        return unsupported_leaf(checkpointable) is None

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return None if abstract_checkpointable is None else self.is_handleable(abstract_checkpointable)


class JsonHandler(PyTreeHandler):
    """Saves values of JSON."""

    def is_handleable(self, checkpointable: Any) -> bool:
        try:
            json.dumps(checkpointable)
        except (TypeError, ValueError):
            return False
        return True

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return None


async def _awaitable(value: Any) -> Any:
    return value
