"""Saves the steps of a run; the namespace `training` of version 1."""

from ...unsupported import refused
from . import errors, preservation_policies, save_decision_policies
from .checkpointer import Checkpointer
from .metadata import CheckpointMetadata, RootMetadata

__all__ = [
    "CheckpointMetadata",
    "Checkpointer",
    "RootMetadata",
    "errors",
    "pathways",
    "preservation_policies",
    "save_decision_policies",
]

pathways = refused("v1.training.pathways")
