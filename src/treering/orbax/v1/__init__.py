"""A drop-in for `from orbax.checkpoint import v1 as ocp`: the same names, saved and loaded by Treering.

>>> from treering.orbax import v1 as ocp

A checkpoint of one tree is one checkpoint of Treering. `save_checkpointables` saves a tree whose root is a `Composite`.
``ocp.Context(write="orbax")``, or the environment variable ``TREERING_ORBAX_WRITE=orbax``, writes Orbax's format.
"""

import importlib
from typing import Any

# Names are imported on first use, so that the import of this package imports neither JAX nor NumPy.
_HOMES = {
    "AbstractCheckpointable": "protocols",
    "AsyncResponse": "responses",
    "CheckpointMetadata": "metadata_types",
    "Checkpointable": "protocols",
    "CheckpointableHandler": "protocols",
    "Context": "context",
    "PLACEHOLDER": "loading",
    "PyTreeMetadata": "metadata_types",
    "StatefulCheckpointable": "protocols",
    "checkpointables_metadata": "describing",
    "is_orbax_checkpoint": "describing",
    "load": "loading",
    "load_async": "loading",
    "load_checkpointables": "loading",
    "load_checkpointables_async": "loading",
    "load_pytree": "loading",
    "load_pytree_async": "loading",
    "metadata": "describing",
    "pytree_metadata": "describing",
    "save": "saving",
    "save_async": "saving",
    "save_checkpointables": "saving",
    "save_checkpointables_async": "saving",
    "save_pytree": "saving",
    "save_pytree_async": "saving",
}
_MODULES = frozenset(("arrays", "errors", "handlers", "multihost", "options", "partial", "path", "training", "tree"))
_REFUSED = frozenset(("delete", "delete_async"))


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    elif name in _MODULES:
        value = importlib.import_module(f".{name}", __name__)
    elif name in _REFUSED:
        value = importlib.import_module("..unsupported", __name__).refused(f"v1.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_HOMES, *_MODULES, *_REFUSED])
