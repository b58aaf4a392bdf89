"""Errors that are Treering's, and also the classes that programs written for Orbax catch."""

from ..errors import ExistsError, NotFoundError, UnsupportedError


class CheckpointExistsError(ExistsError, ValueError):
    """A checkpoint exists at the path, and `force` is False. Nothing was written."""

    __str__ = ExistsError.__str__


class ItemNotFoundError(NotFoundError, KeyError, ValueError):
    """A checkpoint has no item of that name."""

    __str__ = NotFoundError.__str__


class UnsupportedValueError(UnsupportedError, ValueError):
    """An argument asks for something that Treering does not do."""


class StepAlreadyExistsError(CheckpointExistsError):
    """A step exists, and was to be saved in any case. Nothing was written."""


class UnsupportedNameError(UnsupportedError, AttributeError):
    """The program uses a name of Orbax that this package does not support."""
