"""The namespace `checkpoint_manager` of Orbax."""

from .errors import StepAlreadyExistsError
from .manager import CheckpointManager
from .manager_options import AsyncOptions, CheckpointManagerOptions
from .options import FileOptions, MultiprocessingOptions

__all__ = [
    "AsyncOptions",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "FileOptions",
    "MultiprocessingOptions",
    "StepAlreadyExistsError",
]
