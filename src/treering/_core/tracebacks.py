"""Cuts the tracebacks of mistakes, so that they end at the user's call."""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeVar

from ..errors import ExistsError, MismatchError, NotFoundError, UnsupportedError
from . import habits

_MISTAKES = (ExistsError, MismatchError, NotFoundError, UnsupportedError)  # damage and failures keep their frames

F = TypeVar("F", bound=Callable[..., object])
C = TypeVar("C", bound=type)


class _WithoutFrames:
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, _MISTAKES) and all(frame in _OURS for frame in _folders(traceback)):
            error.__traceback__ = None  # Python adds the frames from here on


def _folders(traceback: TracebackType | None) -> Iterator[str]:
    """The file of each frame's code; `_HERE` for all files of this library."""
    while traceback:
        file = traceback.tb_frame.f_code.co_filename
        yield _HERE if file.startswith(_HERE) else file
        traceback = traceback.tb_next


_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep  # of the whole library
_OURS = {_HERE, contextlib.__file__}  # others are the user's: a function that was passed to the library
_without_frames = _WithoutFrames()


def at_the_caller(function: F) -> F:
    """A public call whose errors about its arguments show no frames of this library; causes stay.

    The objects that those frames hold (templates, readers, a `Checkpointer`) are released with them. An error
    about another library's arguments ends with our call.
    """

    @functools.wraps(function)
    def call(*args: object, **options: object) -> object:
        try:
            with _without_frames:
                return function(*args, **options)
        except (TypeError, MismatchError) as error:
            habits.explain(error, function, args, options)
            raise

    return call  # type: ignore[return-value]


def methods_at_the_caller(public: C) -> C:
    """Applies `at_the_caller` to the public methods of a class, and to its `__init__`."""
    for name, value in list(vars(public).items()):
        if inspect.isfunction(value) and (name == "__init__" or not name.startswith("_")):
            setattr(public, name, at_the_caller(value))
    return public
