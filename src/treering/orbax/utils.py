"""The namespace `utils` of Orbax: the functions that programs call."""

from .multihost import broadcast_one_to_all, is_primary_host, reached_preemption, sync_global_processes
from .step import (
    any_checkpoint_step,
    checkpoint_steps,
    checkpoint_steps_paths,
    step_from_checkpoint_name,
)
from .step import is_path_finalized as is_checkpoint_finalized

sync_global_devices = sync_global_processes

__all__ = [
    "any_checkpoint_step",
    "broadcast_one_to_all",
    "checkpoint_steps",
    "checkpoint_steps_paths",
    "is_checkpoint_finalized",
    "is_primary_host",
    "reached_preemption",
    "step_from_checkpoint_name",
    "sync_global_devices",
    "sync_global_processes",
]
