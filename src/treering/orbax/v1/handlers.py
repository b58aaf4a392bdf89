"""Handlers of checkpointables; the namespace `handlers` of version 1."""

from ..unsupported import refused
from .protocols import AbstractCheckpointable, Checkpointable, CheckpointableHandler, StatefulCheckpointable
from .registry import CheckpointableHandlerRegistry, global_registry, local_registry, register_handler
from .tree_handlers import JsonHandler, PyTreeHandler

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

ProtoHandler = refused("v1.handlers.ProtoHandler")
