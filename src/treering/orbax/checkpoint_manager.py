"""The namespace `checkpoint_manager` of Orbax."""

from .errors import StepAlreadyExistsError
from .items import DEFAULT_ITEM as DEFAULT_ITEM_NAME
from .manager import CheckpointManager
from .manager_options import AsyncOptions, CheckpointManagerOptions
from .options import FileOptions, MultiprocessingOptions

__all__ = [
    "DEFAULT_ITEM_NAME",
    "AsyncOptions",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "FileOptions",
    "MultiprocessingOptions",
    "StepAlreadyExistsError",
]
