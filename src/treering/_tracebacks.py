"""Tracebacks of mistakes end where the mistake is: at the call of the user's."""

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar

from .errors import ExistsError, MismatchError, NotFoundError, UnsupportedError

_MISTAKES = (ExistsError, MismatchError, NotFoundError, UnsupportedError)  # damage and failures keep their frames

F = TypeVar("F", bound=Callable[..., object])
C = TypeVar("C", bound=type)


class _WithoutFrames:
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, _MISTAKES):
            error.__traceback__ = None  # Python adds the frames from here on


_without_frames = _WithoutFrames()


def at_the_caller(function: F) -> F:
    """A public call whose errors about its arguments show no frames of this library; causes stay.

    What those frames hold (templates, readers, a `Checkpointer`) is let go with them.
    """

    @functools.wraps(function)
    def call(*args: object, **options: object) -> object:
        with _without_frames:
            return function(*args, **options)

    return call  # type: ignore[return-value]


def methods_at_the_caller(public: C) -> C:
    """The same for the methods of a public class, and for making one of it."""
    for name, value in list(vars(public).items()):
        if inspect.isfunction(value) and (name == "__init__" or not name.startswith("_")):
            setattr(public, name, at_the_caller(value))
    return public
