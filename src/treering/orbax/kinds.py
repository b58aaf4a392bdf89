"""Recognizes the kind of an item by its arguments or its handler.

Arguments and handlers may be those of this package, of Orbax itself or of Grain. The latter two are recognized by the
names of their classes, so that neither library is imported.
"""

from collections.abc import Mapping
from typing import Any, Literal

from ..errors import MismatchError
from . import registration

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


def args_kind(args: Any) -> Kind | None:
    """Returns the kind of item that arguments belong to, None if their class is not registered."""
    handler = registration.registered_handler(args)
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
    return kind, registration.get_registered_handler_cls(args)() if kind == "own" else handler


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
