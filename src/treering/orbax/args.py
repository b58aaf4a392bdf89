"""The arguments of saves and restores, and the registration of your own; the namespace `args` of Orbax."""

from . import handlers as handlers  # It registers the arguments with their handlers.
from .arguments import (
    ArrayRestore,
    ArraySave,
    Composite,
    JaxRandomKeyRestore,
    JaxRandomKeySave,
    JsonRestore,
    JsonSave,
    NumpyRandomKeyRestore,
    NumpyRandomKeySave,
    PyTreeRestore,
    PyTreeSave,
    StandardRestore,
    StandardSave,
)
from .registration import (
    CheckpointArgs,
    get_registered_args_cls,
    get_registered_handler_cls,
    has_registered_args,
    register_with_handler,
)
from .unsupported import refused

__all__ = [
    "ArrayRestore",
    "ArraySave",
    "CheckpointArgs",
    "Composite",
    "JaxRandomKeyRestore",
    "JaxRandomKeySave",
    "JsonRestore",
    "JsonSave",
    "NumpyRandomKeyRestore",
    "NumpyRandomKeySave",
    "PyTreeRestore",
    "PyTreeSave",
    "StandardRestore",
    "StandardSave",
    "get_registered_args_cls",
    "get_registered_handler_cls",
    "has_registered_args",
    "register_with_handler",
]

ProtoSave = refused("args.ProtoSave")
ProtoRestore = refused("args.ProtoRestore")
