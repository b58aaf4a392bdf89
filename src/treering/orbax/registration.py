"""Relates classes of arguments to the handlers that save and restore with them, and keeps handlers by item.

Arguments and handlers may be those of this package, of Orbax itself or of Grain. The latter two are recognized by the
names of their classes, so that neither library is imported.
"""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeVar

from ..errors import MismatchError
from .errors import NoEntryError

Kind = Literal["standard", "pytree", "json", "array", "jax-key", "numpy-key", "iterator", "composite", "own"]

_PREFIXES: dict[str, Kind] = {
    "Standard": "standard",
    "PyTree": "pytree",
    "Json": "json",
    "Array": "array",
    "JaxRandomKey": "jax-key",
    "NumpyRandomKey": "numpy-key",
    "Composite": "composite",
}
_ARGUMENTS: dict[str, Kind] = {
    f"{prefix}{end}": kind for prefix, kind in _PREFIXES.items() for end in ("Save", "Restore")
}
_ARGUMENTS |= {f"{name}Args": kind for name, kind in _ARGUMENTS.items()}  # the names in Orbax itself
_ARGUMENTS |= {"Composite": "composite", "CompositeArgs": "composite"}
_HANDLERS: dict[str, Kind] = {f"{prefix}CheckpointHandler": kind for prefix, kind in _PREFIXES.items()}
_OWN_METHODS = {"save", "async_save", "restore"}
_TREES = ("standard", "pytree")
A = TypeVar("A", bound=type)
_FOR_SAVE: dict[type, type] = {}
_FOR_RESTORE: dict[type, type] = {}


@dataclasses.dataclass
class CheckpointArgs:
    """The base of all arguments of a save or a restore. Subclasses are registered with a handler."""


def register_with_handler(handler_cls: type, for_save: bool = False, for_restore: bool = False) -> Callable[[A], A]:
    """Returns a decorator that registers a class of arguments with the class of a handler.

    Raises `MismatchError` if neither `for_save` nor `for_restore` is True. The decorator raises `TypeError` for a class
    that is not derived from `CheckpointArgs`.
    """
    if not for_save and not for_restore:
        raise MismatchError("register_with_handler: expected for_save=True or for_restore=True, found neither")

    def register(cls: A) -> A:
        if not is_args_class(cls):
            raise TypeError(f"register_with_handler: {cls!r} must subclass CheckpointArgs")
        if for_save:
            _FOR_SAVE[cls] = handler_cls
        if for_restore:
            _FOR_RESTORE[cls] = handler_cls
        return cls

    return register


def is_args_class(cls: Any) -> bool:
    """Returns True for a class of arguments, of this package or of Orbax itself."""
    return inspect.isclass(cls) and any(base.__name__ == CheckpointArgs.__name__ for base in cls.__mro__)


def get_registered_handler_cls(arg: Any) -> type:
    """Returns the class of the handler that arguments, or a class of arguments, are registered with.

    Raises `TypeError` for anything but arguments, and `MismatchError` for arguments that are not registered.
    """
    cls = arg if inspect.isclass(arg) else type(arg)
    if not is_args_class(cls):
        raise TypeError(f"expected a subclass of CheckpointArgs, found {cls!r}")
    found = registered_handler(cls)
    if found is None:
        raise MismatchError(
            f"{cls.__name__}: expected arguments that are registered with a handler; use register_with_handler"
        )
    return found


def registered_handler(arg: Any) -> type | None:
    """Returns the class of the handler that arguments are registered with, or None."""
    cls = arg if inspect.isclass(arg) else type(arg)
    return _FOR_SAVE.get(cls) or _FOR_RESTORE.get(cls) or _found_in_orbax("get_registered_handler_cls", cls)


def get_registered_args_cls(handler: Any) -> tuple[type, type]:
    """Returns the two classes of arguments, for save and restore, that a handler or its class is registered with.

    Raises `MismatchError` if one of the two is missing.
    """
    cls = handler if inspect.isclass(handler) else type(handler)
    found = tuple(
        next((args for args, other in known.items() if other is cls), None) for known in (_FOR_SAVE, _FOR_RESTORE)
    )
    if None in found:
        found = _found_in_orbax("get_registered_args_cls", cls) or found
    save, restore = found
    if save is None or restore is None:
        raise MismatchError(
            f"{cls.__name__}: expected a handler with registered arguments for {'save' if save is None else 'restore'}"
            "; use register_with_handler"
        )
    return save, restore


def has_registered_args(handler: Any) -> bool:
    """Returns True if a handler has arguments for save and for restore."""
    try:
        get_registered_args_cls(handler)
    except MismatchError:
        return False
    return True


def _found_in_orbax(function: str, cls: type) -> Any:
    """Returns what the registry of Orbax itself says, if the program has imported Orbax. Grain registers there."""
    theirs = sys.modules.get("orbax.checkpoint.checkpoint_args")
    try:
        return None if theirs is None else getattr(theirs, function)(cls)
    except (TypeError, ValueError):  # It does not know the class.
        return None


class AlreadyExistsError(MismatchError):
    """The registry has an entry for this item and these arguments."""


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


def args_kind(args: Any) -> Kind | None:
    """Returns the kind of item that arguments belong to, None if their class is not registered."""
    handler = registered_handler(args)
    if handler is not None:
        return class_kind(handler)
    return next((_ARGUMENTS[base.__name__] for base in type(args).__mro__ if base.__name__ in _ARGUMENTS), None)


def handler_kind(handler: Any) -> Kind:
    """Returns the kind of item that a handler saves; "own" if a method of its own saves or restores."""
    return class_kind(type(handler))


def class_kind(handler: type) -> Kind:
    """Returns the kind of item that handlers of a class save."""
    for base in handler.__mro__:
        if base.__module__.startswith("grain."):
            return "iterator"
        if base.__name__ in _HANDLERS and base.__module__.startswith(("treering.orbax.", "orbax.checkpoint.")):
            return _HANDLERS[base.__name__]
        if _OWN_METHODS & vars(base).keys():
            return "own"
    return "own"


def resolve(args: Any, handler: Any = None) -> tuple[Kind | None, Any]:
    """Returns the kind of an item, and the handler if it is one of the program's own.

    The kind is None if there are neither arguments nor a handler: the checkpoint says it then.

    Raises `MismatchError` for arguments that are not registered, and for a handler of another kind.
    """
    of_handler = None if handler is None else handler_kind(handler)
    if of_handler == "own" or args is None:
        return of_handler, handler
    if of_handler is not None:
        kinds = {_ARGUMENTS[base.__name__] for base in type(args).__mro__ if base.__name__ in _ARGUMENTS}
        if of_handler in kinds or (of_handler in _TREES and kinds & {*_TREES}) or of_handler == "iterator":
            return of_handler, handler
        raise MismatchError(
            f"{type(handler).__name__}: expected its own arguments, found {type(args).__name__}, which are not "
            "registered with it"
        )
    kind = args_kind(args)
    if kind is None:
        raise MismatchError(
            f"{type(args).__name__}: expected arguments that are registered with a handler, such as args.StandardSave; "
            "use args.register_with_handler"
        )
    return kind, get_registered_handler_cls(args)() if kind == "own" else handler


def handler_of(name: str | None, args: Any, handlers: Any) -> Any:
    """Returns the handler of an item in a mapping or a registry, or None."""
    if handlers is None:
        return None
    if isinstance(handlers, Mapping):
        return handlers.get(name)
    if args is None:
        return next((one for (item, _), one in handlers.get_all_entries().items() if item == name), None)
    if handlers.has(name, args):
        return handlers.get(name, args)
    if any(item == name for item, _ in handlers.get_all_entries()):
        raise MismatchError(f"{name}: expected arguments registered for this item, found {type(args).__name__}")
    return handlers.get(None, args) if handlers.has(None, args) else None


def handlers_in(handler: Any) -> Any:
    """Returns the handlers of items in a `CompositeCheckpointHandler` of this package or of Orbax, None if it has none.

    They are a mapping by name, or a registry.
    """
    return getattr(handler, "handlers", None) or getattr(handler, "_handler_registry", None)
