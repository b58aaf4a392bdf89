"""Shortens the tracebacks of mistakes, so that they end at the user's call."""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeVar

from ..errors import ExistsError, MismatchError, NotFoundError, UnsupportedError
from . import migration_hints

_USAGE_ERRORS = (ExistsError, MismatchError, NotFoundError, UnsupportedError)  # damage and failures keep their frames

F = TypeVar("F", bound=Callable[..., object])
C = TypeVar("C", bound=type)


class _WithoutFrames:
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, _USAGE_ERRORS) and all(frame in _HIDDEN_FILES for frame in _folders(traceback)):
            error.__traceback__ = None  # Python adds the frames above this one while the error goes up.


def _folders(traceback: TracebackType | None) -> Iterator[str]:
    """Yields the file of each frame's code, with `_PACKAGE_FOLDER` for all files of this library."""
    while traceback:
        file = traceback.tb_frame.f_code.co_filename
        yield _PACKAGE_FOLDER if file.startswith(_PACKAGE_FOLDER) else file
        traceback = traceback.tb_next


_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep  # the folder of the library
_HIDDEN_FILES = {
    _PACKAGE_FOLDER,
    contextlib.__file__,
}  # Any other frame is the user's, such as a function passed to the library.
_without_frames = _WithoutFrames()


def hide_internal_frames(function: F) -> F:
    """Makes a public call whose errors about its arguments show no frames of this library. Causes stay.

    This also releases the objects that those frames hold: templates, readers, a `Checkpointer`. An error about the
    arguments of another library ends with the call of Treering.
    """

    @functools.wraps(function)
    def call(*args: object, **options: object) -> object:
        try:
            with _without_frames:
                return function(*args, **options)
        except (TypeError, MismatchError) as error:
            migration_hints.add_hint(error, function, args, options)
            raise

    return call  # type: ignore[return-value]


def hide_internal_frames_of_methods(public: C) -> C:
    """Applies `hide_internal_frames` to the public methods of a class, and to its `__init__`."""
    for name, value in list(vars(public).items()):
        if inspect.isfunction(value) and (name == "__init__" or not name.startswith("_")):
            setattr(public, name, hide_internal_frames(value))
    return public
