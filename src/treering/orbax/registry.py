"""Keeps the handlers of a program, by the name of an item and the class of its arguments."""

import inspect
from typing import Any, Protocol

from ..errors import MismatchError, NotFoundError
from .registration import get_registered_args_cls, get_registered_handler_cls


class AlreadyExistsError(MismatchError):
    """The registry has an entry for this item and these arguments."""


class NoEntryError(NotFoundError, KeyError):
    """The registry has no entry for this item and these arguments."""

    __str__ = NotFoundError.__str__


class CheckpointHandlerRegistry(Protocol):
    """The protocol of a registry."""

    def add(self, item: str | None, args: Any, handler: Any = None) -> None:
        """Adds a handler."""
        ...

    def get(self, item: str | None, args: Any) -> Any:
        """Returns a handler."""
        ...

    def has(self, item: str | None, args: Any) -> bool:
        """Returns True if there is a handler."""
        ...

    def get_all_entries(self) -> dict[tuple[str | None, type], Any]:
        """Returns all handlers."""
        ...


class DefaultCheckpointHandlerRegistry(CheckpointHandlerRegistry):
    """A registry in memory, which begins with the entries of another one."""

    def __init__(self, other_registry: CheckpointHandlerRegistry | None = None):
        self._entries: dict[tuple[str | None, type], Any] = {}
        for (item, args), handler in other_registry.get_all_entries().items() if other_registry else ():
            self.add(item, args, handler)

    def add(self, item: str | None, args: Any, handler: Any = None) -> None:
        """Adds a handler, or an instance of its class, for an item and a class of arguments.

        item: the name, or None for any item.
        handler: by default the one that the arguments are registered with.

        Raises `AlreadyExistsError` for a second handler, and `MismatchError` if no handler can be made.
        """
        key = item, _class(args)
        if key in self._entries:
            raise AlreadyExistsError(
                f"a handler for item={item!r} and {key[1].__name__} already exists in the registry"
            )
        made = get_registered_handler_cls(args) if handler is None else handler
        if isinstance(made, type):
            try:
                made = made()
            except TypeError as error:
                raise MismatchError(
                    f"{made.__name__}: expected a handler whose constructor needs no arguments: {error}; pass handler="
                ) from error
        self._entries[key] = made

    def get(self, item: str | None, args: Any) -> Any:
        """Returns the handler of an item and a class of arguments. Raises `NoEntryError` if there is none."""
        key = item, _class(args)
        if key not in self._entries:
            raise NoEntryError(f"the registry has no handler for item={item!r} and {key[1].__name__}")
        return self._entries[key]

    def has(self, item: str | None, args: Any) -> bool:
        """Returns True if there is a handler of an item and a class of arguments."""
        return (item, _class(args)) in self._entries

    def get_all_entries(self) -> dict[tuple[str | None, type], Any]:
        """Returns all handlers, by the names of items and the classes of arguments."""
        return self._entries

    def __repr__(self) -> str:
        return f"DefaultCheckpointHandlerRegistry({self._entries})"


def create_default_handler_registry(**items_to_handlers: Any) -> DefaultCheckpointHandlerRegistry:
    """Returns a registry of handlers by the names of items, each for its registered arguments."""
    made = DefaultCheckpointHandlerRegistry()
    for item, handler in items_to_handlers.items():
        for args in dict.fromkeys(get_registered_args_cls(handler)):
            made.add(item, args, handler)
    return made


def _class(args: Any) -> type:
    return args if inspect.isclass(args) else type(args)
