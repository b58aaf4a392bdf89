"""Errors that are Treering's, and also the classes that programs written for Orbax catch; options without effect."""

import functools
import logging
from typing import Any

from ..errors import ExistsError, MismatchError, NotFoundError, UnsupportedError

_log = logging.getLogger("treering")


class CheckpointExistsError(ExistsError, ValueError):
    """A checkpoint exists at the path, and `force` is False. Nothing was written."""

    __str__ = ExistsError.__str__


def exists_error(error: ExistsError) -> CheckpointExistsError:
    """Returns the error of an existing path for a call whose argument is `force`."""
    return CheckpointExistsError(str(error).replace("overwrite=True", "force=True"))


class ItemNotFoundError(NotFoundError, KeyError, ValueError):
    """A checkpoint has no item of that name."""

    __str__ = NotFoundError.__str__


class UnsupportedValueError(UnsupportedError, ValueError):
    """An argument asks for something that Treering does not do."""


class StepAlreadyExistsError(CheckpointExistsError):
    """A step exists, and was to be saved in any case. Nothing was written."""


class UnsupportedNameError(UnsupportedError, AttributeError):
    """The program uses a name of Orbax that this package does not support."""


class InvalidLayoutError(NotFoundError, ValueError):
    """There is no checkpoint at the path, or none with a tree of that name."""

    __str__ = NotFoundError.__str__


class NoCheckpointableError(InvalidLayoutError, KeyError):
    """A checkpoint has no checkpointable of that name."""

    __str__ = NotFoundError.__str__


class NoEntryError(NotFoundError, KeyError):
    """No registered handler fits an item or a checkpointable."""

    __str__ = NotFoundError.__str__


class DeletionInProgressError(UnsupportedError, RuntimeError):
    """A deletion is under way. Never raised: Treering deletes in one operation."""


class DeletionRecoveryError(UnsupportedError, RuntimeError):
    """A deletion cannot be completed. Never raised: Treering deletes in one operation."""


class LeafNotFoundError(MismatchError, KeyError):
    """A checkpoint lacks a leaf of the abstract tree. Version 1 of Orbax 0.12.8 raises `KeyError`."""

    __str__ = MismatchError.__str__


class StepNotFoundError(NotFoundError):
    """A run has no such step, or no step at all."""


def warn_unused(owner: str, **options: tuple[Any, Any]) -> None:
    """Logs the options that differ from their defaults, once for each. An option is a value and its default."""
    for name, (value, default) in options.items():
        if value is not default and value != default:
            _warn_once(f"{owner}: {name}= has no effect; Treering chooses its own files and buffers")


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


def check_processes(options: Any) -> None:
    """Raises `UnsupportedValueError` for `MultiprocessingOptions` that exclude processes or choose a primary one."""
    if getattr(options, "active_processes", None) is not None:
        raise UnsupportedValueError(
            "active_processes: expected None, because all processes save; for a save of one process, use "
            "treering.save(processes='this')"
        )
    if getattr(options, "primary_host", 0) not in (0, None):
        raise UnsupportedValueError("primary_host: expected 0, because process 0 commits")
