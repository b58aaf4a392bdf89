"""Calls made by a signal handler in the middle of another call of the same thread."""

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

from ..errors import MismatchError

_alone: set[CodeType] = set()
_open: set[CodeType] = set()

F = TypeVar("F", bound=Callable[..., Any])


def alone(function: F) -> F:
    """Marks a function, or a method of an object that writes a run, within which no other call can be made."""
    _alone.add(function.__code__)
    return function


def calls_back(function: F) -> F:
    """Marks a function that calls the user's code, which may make other calls: nothing waits meanwhile."""
    _open.add(function.__code__)
    return function


def refuse_within(name: str, owner: object = None) -> None:
    """Raises `MismatchError` when a signal handler made the calling call within a function marked `alone`.

    The new call would wait for that function, which cannot go on before the handler returns. Of methods, those of
    `owner` count. The user's code below `calls_back` (containers that flatten themselves, iterators that give their
    state) may make calls of its own. Only the stack is inspected: there is no record that an interrupt could leave
    behind.
    """
    frame = sys._getframe(1).f_back
    while frame and frame.f_code not in _open:
        if frame.f_code in _alone and frame.f_locals.get("self", owner) is owner:
            raise MismatchError(
                f"{name}: called by the handler of a signal in the middle of another call, which cannot end before the "
                "handler returns; let the handler set a flag and save in the loop, or pass save_on_preemption=True to "
                "the Checkpointer (or save_on_error=True, where the handler raises)"
            )
        frame = frame.f_back
