"""Errors of a run."""

from ....errors import NotFoundError
from ...errors import StepAlreadyExistsError as StepAlreadyExistsError


class StepNotFoundError(NotFoundError):
    """A run has no such step, or no step at all."""
