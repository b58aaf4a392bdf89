"""Errors that are Treering's, and also the classes that programs written for version 1 of Orbax catch."""

from ...errors import NotFoundError
from ..unsupported import refused


class InvalidLayoutError(NotFoundError, ValueError):
    """There is no checkpoint at the path, or none with a tree of that name."""

    __str__ = NotFoundError.__str__


class NoCheckpointableError(InvalidLayoutError, KeyError):
    """A checkpoint has no checkpointable of that name."""

    __str__ = NotFoundError.__str__


class NoEntryError(NotFoundError, KeyError):
    """No registered handler fits a checkpointable."""

    __str__ = NotFoundError.__str__


DeletionInProgressError = refused("v1.errors.DeletionInProgressError")
DeletionRecoveryError = refused("v1.errors.DeletionRecoveryError")
