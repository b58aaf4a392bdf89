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


def hide_internal_frames(function: F) -> F:
    """Makes a public call whose errors about its arguments show no frames of this library. Causes stay.

    This also releases the objects that those frames hold: templates, readers, a `Checkpointer`. Python's errors about
    arguments get the public name of the call and its parameters, or the call that replaces one of another library.
    """

    @functools.wraps(function)
    def call(*args: object, **options: object) -> object:
        try:
            return function(*args, **options)
        except (TypeError, *_USAGE_ERRORS) as error:
            if isinstance(error, _USAGE_ERRORS) and _HIDDEN_FILES.issuperset(_folders(error.__traceback__)):
                error.__traceback__ = None  # Python adds the frames above this one while the error goes up.
            if isinstance(error, TypeError | MismatchError):
                migration_hints.add_hint(error, function, args, options)
            raise

    return call  # type: ignore[return-value]


def hide_internal_frames_of_methods(public: C) -> C:
    """Applies `hide_internal_frames` to the public methods of a class, and to its `__init__`."""
    for name, value in list(vars(public).items()):
        if inspect.isfunction(value) and (name == "__init__" or not name.startswith("_")):
            setattr(public, name, hide_internal_frames(value))
    return public
