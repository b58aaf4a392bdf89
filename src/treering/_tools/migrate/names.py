"""Maps names of Orbax to those of the adapter `treering.orbax`, and knows which names the adapter lacks."""

import importlib
import types

ORBAX, ADAPTER = "orbax.checkpoint", "treering.orbax"
_OLD_V1 = f"{ORBAX}.experimental.v1"  # Older releases of Orbax have version 1 only there.
MODULES = {_OLD_V1: f"{ADAPTER}.v1", ORBAX: ADAPTER}  # modules with a name of their own, the longest first
FLAX = "flax.training.orbax_utils"  # It imports Orbax.


def relative(name: str) -> str | None:
    """Returns a dotted name within `orbax.checkpoint`, "" for the module itself, or None if it is not of Orbax.

    A name within the adapter is one too, so that a migrated program can be migrated further.
    """
    if f"{name}.".startswith(f"{ADAPTER}."):
        return name[len(ADAPTER) + 1 :]
    if not f"{name}.".startswith(f"{ORBAX}."):
        return None
    if f"{name}.".startswith(f"{_OLD_V1}."):
        name = f"{ORBAX}.v1{name.removeprefix(_OLD_V1)}"
    return name[len(ORBAX) + 1 :]


def problem(inner: str) -> str | None:
    """Returns what to do about a name within `orbax.checkpoint` that the adapter lacks, or None if it has the name."""
    if is_private(inner):
        return "is private to Orbax; use a public name"
    # The adapter is a layer above, and a program that has nothing to migrate does not need it.
    found, namespaces = importlib.import_module(ADAPTER), importlib.import_module(f"{ADAPTER}.namespaces")
    parts = inner.split(".") if inner else []
    for level, part in enumerate(parts):
        path = ".".join(parts[: level + 1])
        known = isinstance(found, types.ModuleType | type)
        if namespaces.is_refused(found) or (known and not hasattr(found, part)):
            instead = namespaces.advice(path) or "see docs/migrate/orbax.md"
            return f"is not in {ADAPTER}; {instead}"
        if not known:  # an attribute of an object, such as the result of a call
            return None
        found = getattr(found, part)
    return f"is not in {ADAPTER}; {namespaces.advice(inner)}" if namespaces.is_refused(found) else None


def is_private(inner: str) -> bool:
    """Returns True if a part of a dotted name begins with an underscore."""
    return any(part.startswith("_") for part in inner.split("."))


def new_module(name: str) -> str | None:
    """Returns the module of the adapter that stands for a module of Orbax, or None if there is none."""
    inner = relative(name)
    if inner is None or problem(inner):
        return None
    return f"{ADAPTER}.{inner}" if inner else ADAPTER
