"""A drop-in for `import orbax.checkpoint as ocp`: the same names, saved and restored by Treering.

>>> import treering.orbax as ocp

It writes Treering's format, or Orbax's with ``write="orbax"``, and reads both. docs/migrate/orbax.md says what differs.
"""

import importlib
import importlib.util
from typing import Any

# Names are imported on first use, so that the import of this package imports neither JAX nor NumPy.
_HOMES = {
    "ArrayCheckpointHandler": "handlers",
    "ArrayRestoreArgs": "restore_args",
    "AsyncCheckpointHandler": "handlers",
    "AsyncCheckpointer": "checkpointers",
    "AsyncOptions": "manager_options",
    "CheckpointHandler": "handlers",
    "CheckpointHandlerRegistry": "handlers",
    "CheckpointManager": "manager",
    "CheckpointManagerOptions": "manager_options",
    "Checkpointer": "checkpointers",
    "CompositeCheckpointHandler": "handlers",
    "CompositeOptions": "handlers",
    "DefaultCheckpointHandlerRegistry": "handlers",
    "Future": "future",
    "JaxRandomKeyCheckpointHandler": "handlers",
    "JsonCheckpointHandler": "handlers",
    "NumpyRandomKeyCheckpointHandler": "handlers",
    "PLACEHOLDER": "restore_args",
    "PyTreeCheckpointHandler": "handlers",
    "PyTreeCheckpointer": "checkpointers",
    "RestoreArgs": "restore_args",
    "SaveArgs": "restore_args",
    "StandardCheckpointHandler": "handlers",
    "StandardCheckpointer": "checkpointers",
}
# Public namespaces, and the modules of this package that they are.
_MODULES = {
    "args": "args",
    "checkpoint_args": "registration",
    "checkpoint_manager": "checkpoint_manager",
    "checkpoint_managers": "checkpoint_managers",
    "checkpoint_utils": "checkpoint_utils",
    "checkpointers": "checkpointers",
    "experimental": "experimental",
    "future": "future",
    "handlers": "handlers",
    "metadata": "metadata",
    "multihost": "multihost",
    "options": "options",
    "path": "path",
    "pathways": "pathways",
    "step": "step",
    "test_utils": "test_utils",
    "type_handlers": "type_handlers",
    "utils": "utils",
    "v1": "v1",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    elif name in _MODULES and importlib.util.find_spec(f"{__name__}.{_MODULES[name]}"):
        value = importlib.import_module(f".{_MODULES[name]}", __name__)
    else:
        # `from . import` would call this function again.
        unsupported = importlib.import_module(".unsupported", __name__)
        if not unsupported.is_refused(name):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = unsupported.refused(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_HOMES, *_MODULES])
