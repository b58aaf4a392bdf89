"""The protocols of handlers and of objects that save themselves, registries of handlers, and the choice of one.

Handlers of your own, and objects that save themselves, write files, which are kept.
"""

import asyncio
import concurrent.futures
import contextvars
import inspect
import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from ...errors import MismatchError
from .. import nodes
from ..errors import NoEntryError

T = TypeVar("T")
A = TypeVar("A")
PathLike = str | os.PathLike[str]
Path = Any  # of `etils.epath` if that is installed, else of `pathlib`
HANDLER = ".handler"  # the file with the name of the class that wrote the others
C = TypeVar("C", bound=type)


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


class CheckpointableHandlerRegistry(Protocol):
    """Has the classes of handlers. The one that was added last has precedence."""

    def add(self, handler_type: Any, checkpointable_name: str | None = None, **other: Any) -> None:
        """Adds the class of a handler, for one name or for all."""
        ...

    def get(self, checkpointable_name: str) -> Any:
        """Returns the class of the handler for a name."""
        ...

    def has(self, checkpointable_name: str) -> bool:
        """Returns True if there is a handler for a name."""
        ...

    def get_all_entries(self) -> Sequence[tuple[Any, str | None]]:
        """Returns the classes and their names, None for all names."""
        ...


class Registry:
    """A registry of classes of handlers."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, str | None]] = []
        self._other_names: dict[Any, tuple[str, ...]] = {}

    def add(
        self,
        handler_type: Any,
        checkpointable_name: str | None = None,
        secondary_typestrs: Sequence[str] | None = None,
    ) -> None:
        """Adds the class of a handler.

        checkpointable_name: the only name for which the handler is used; it then need not be able to handle the object.
        secondary_typestrs: former names of the class, as checkpoints record them.

        Raises `MismatchError`, which is a `ValueError`, for a class that is already there, a name that has a handler,
        and a class that cannot be made without arguments.
        """
        if (handler_type, checkpointable_name) in self._entries or self.has(checkpointable_name):
            raise MismatchError(f"{checkpointable_name or handler_type.__name__}: expected a new entry, found one")
        make_handler(handler_type)
        self._entries.append((handler_type, checkpointable_name))
        self._other_names[handler_type] = (*self._other_names.get(handler_type, ()), *(secondary_typestrs or ()))

    def get(self, checkpointable_name: str) -> Any:
        """Returns the class of the handler for a name. Raises `NoEntryError`, which is a `KeyError`."""
        for handler_type, name in self._entries:
            if name == checkpointable_name:
                return handler_type
        raise NoEntryError(f"{checkpointable_name}: expected a handler registered for this name, found none")

    def has(self, checkpointable_name: str | None) -> bool:
        """Returns True if there is a handler for a name."""
        return checkpointable_name is not None and any(name == checkpointable_name for _, name in self._entries)

    def get_all_entries(self) -> list[tuple[Any, str | None]]:
        """Returns the classes and their names, None for all names, in the order in which they were added."""
        return list(self._entries)

    def get_secondary_typestrs(self, handler_type: Any) -> Sequence[str]:
        """Returns the former names of a class."""
        return self._other_names.get(handler_type, ())


_GLOBAL = Registry()


def global_registry() -> Registry:
    """Returns the registry of all contexts that have none of their own. It has no handlers for trees, nor needs any."""
    return _GLOBAL


def local_registry(other_registry: Any = None, *, include_global_registry: bool = True) -> Registry:
    """Returns a new registry with the entries of another, and of the global one."""
    registry = Registry()
    sources: list[Any] = [global_registry()] if include_global_registry else []
    for source in sources if other_registry is None else [*sources, other_registry]:
        for handler_type, name in source.get_all_entries():
            registry.add(handler_type, name, source.get_secondary_typestrs(handler_type))
    return registry


def register_handler(
    cls: C, *, checkpointable_name: str | None = None, secondary_typestrs: Sequence[str] | None = None
) -> C:
    """Adds the class of a handler to the global registry; see `Registry.add`. Returns the class."""
    global_registry().add(cls, checkpointable_name, secondary_typestrs)
    return cls


def make_handler(handler_type: Any) -> Any:
    """Returns a handler of a class. Raises `MismatchError` if that takes arguments."""
    try:
        return handler_type()
    except TypeError as error:
        raise MismatchError(f"{handler_type!r}: expected a class that takes no arguments: {error}") from error


def typestr(handler: Any) -> str:
    """Returns the name of the class of a handler, as checkpoints record it."""
    cls = handler if isinstance(handler, type) else type(handler)
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_own(handler_type: Any) -> bool:
    """Returns True if Treering does not do by itself what handlers of a class do."""
    ours = handler_type.__module__.startswith(("treering.orbax.", "orbax.checkpoint.", "grain."))
    return not (ours and handler_type.__name__ in ("PyTreeHandler", "JsonHandler"))


def handler_to_save(registry: Any, name: str, value: Any) -> Any:
    """Returns the handler of your own that saves a checkpointable; None if Treering saves it."""
    if registry.has(name):
        return make_handler(registry.get(name)) if _is_own(registry.get(name)) else None
    return _able(registry, lambda handler: handler.is_handleable(value))


def handler_to_load(registry: Any, name: str, abstract: Any, saved_by: str | None) -> Any:
    """Returns the handler of your own that loads the files that one has saved; None if there is none.

    saved_by: the name of the class that saved them.
    """
    found = handler_on_record(registry, name, abstract, saved_by)
    if found is None and abstract is not None:
        found = _able(registry, lambda handler: _can_load(handler, abstract))
    return found or _named(registry, name)


def handler_on_record(registry: Any, name: str, abstract: Any, saved_by: str | None) -> Any:
    """Returns the handler of your own that is registered for a name, or that has saved it, if it is able to load it."""
    saver = next((make_handler(one) for one in _own(registry) if saved_by in _typestrs(registry, one)), None)
    for handler in (_named(registry, name), saver):
        if handler is not None and (abstract is None or _can_load(handler, abstract)):
            return handler
    return None


def _named(registry: Any, name: str) -> Any:
    return make_handler(registry.get(name)) if registry.has(name) and _is_own(registry.get(name)) else None


def _can_load(handler: Any, abstract: Any) -> bool:
    return bool(handler.is_abstract_handleable(abstract))


def _able(registry: Any, is_able: Callable[[Any], bool]) -> Any:
    """Returns the last handler of your own, of those for all names, that is able to do something; or None."""
    made = (make_handler(one) for one in _own(registry, named=False))
    return next((handler for handler in made if is_able(handler)), None)


def _own(registry: Any, *, named: bool = True) -> list[Any]:
    entries = reversed(registry.get_all_entries())
    return [one for one, name in entries if _is_own(one) and (named or name is None)]


def _typestrs(registry: Any, handler_type: Any) -> tuple[str, ...]:
    return typestr(handler_type), *registry.get_secondary_typestrs(handler_type)


class Directory:
    """A directory that a handler saves into, which exists already, or a path in it."""

    def __init__(self, path: Any):
        self.path = path

    def __truediv__(self, name: str | os.PathLike[str]) -> "Directory":
        return Directory(self.path / name)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    async def await_creation(self) -> Any:
        """Returns the path."""
        return self.path


def save_files(value: Any, handler: Any) -> nodes.HandlerFiles:
    """Returns the files that a handler writes for an object, or that the object writes itself without a handler."""
    saver = value if handler is None else handler
    nodes.check_one_process(saver)
    with tempfile.TemporaryDirectory(prefix="treering-") as folder:
        directory = Directory(nodes.path_object(folder))
        run(lambda: saver.save(directory) if handler is None else saver.save(directory, value))
        found = nodes.files_in(folder)
    if handler is not None:
        found[HANDLER] = np.frombuffer(typestr(handler).encode(), np.uint8)
    return nodes.handler_files(found)


def class_of_handler(files: Mapping[str, Any]) -> str | None:
    """Returns the name of the class of the handler that wrote files, None for an object that saved itself."""
    return np.asarray(files[HANDLER]).tobytes().decode() if HANDLER in files else None


def load_files(files: Mapping[str, Any], handler: Any, abstract: Any) -> Any:
    """Returns what a handler, or an object itself, loads from files."""
    with tempfile.TemporaryDirectory(prefix="treering-") as folder:
        nodes.write_files({name: one for name, one in files.items() if name != HANDLER}, folder)
        return load_directory(nodes.path_object(folder), handler, abstract)


def load_directory(directory: Any, handler: Any, abstract: Any) -> Any:
    """Returns what a handler, or an object itself, loads from a directory."""
    nodes.check_one_process(handler or abstract)
    if handler is not None:
        return run(lambda: handler.load(directory, abstract))
    if not isinstance(abstract, StatefulCheckpointable):
        raise MismatchError(
            f"{directory}: expected the object that loads these files itself, or a registered handler, found "
            f"{'nothing' if abstract is None else type(abstract).__name__}"
        )
    run(lambda: abstract.load(directory))
    return abstract


def metadata_of_files(files: Mapping[str, Any], handler: Any) -> Any:
    """Returns what a handler says about files."""
    with tempfile.TemporaryDirectory(prefix="treering-") as folder:
        nodes.write_files({name: one for name, one in files.items() if name != HANDLER}, folder)
        return run(lambda: handler.metadata(nodes.path_object(folder)))


def run(call: Callable[[], Awaitable[Any]]) -> Any:
    """Returns the result of a coroutine. If it is another awaitable, returns the result of that one."""

    async def awaited() -> Any:
        result = await call()
        return await result if inspect.isawaitable(result) else result

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(awaited())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # A notebook has a running loop.
        return pool.submit(contextvars.copy_context().run, asyncio.run, awaited()).result()
