"""Lists the public names of the installed Orbax."""

import types
from collections.abc import Iterator
from typing import Any

import orbax.checkpoint as real

# Modules that Orbax's files import for themselves. Those that list names for programs are all others.
EXPORTS = ("checkpoint_managers", "handlers", "logging", "metadata", "path", "v1", "v1.path", "v1.training")


def _public(module: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the public names of a module that Orbax itself defines, and the modules that it lists for programs."""
    inner = "._src." in module.__name__
    for name in getattr(module, "__all__", None) or vars(module):
        value = getattr(module, name, None)
        if name.startswith("_") or name == "annotations":
            continue
        if isinstance(value, types.ModuleType):
            is_listed = not path or path in EXPORTS
            if is_listed and not inner and value.__name__.startswith("orbax.") and value.__name__.endswith(f".{name}"):
                yield name, value
        elif isinstance(value, type | types.FunctionType):
            home = value.__module__
            if home == module.__name__ if inner else home.startswith("orbax."):
                yield name, value
        elif name.isupper():
            yield name, value


def names(module: Any = real, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields all public names with their namespaces."""
    for name, value in _public(module, path):
        place = f"{path}.{name}".lstrip(".")
        yield place, value
        if isinstance(value, types.ModuleType):
            yield from names(value, place)
