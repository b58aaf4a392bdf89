"""The namespace `checkpoint_manager` of Orbax."""

from .errors import StepAlreadyExistsError
from .manager import CheckpointManager
from .manager_options import AsyncOptions, CheckpointManagerOptions

__all__ = ["AsyncOptions", "CheckpointManager", "CheckpointManagerOptions", "StepAlreadyExistsError"]
