"""Calls in the middle of another one, in the same thread: from a signal's handler, or a function of a rule."""

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
    """Raises `MismatchError` when the calling function was called in the middle of one alone.

    It would wait for that one, which cannot go on before the signal's handler, or the function of a rule, returns.
    Of methods, those of `owner` count.
    Containers that flatten themselves and iterators that tell their state may make calls of their own.
    The stack is looked at, and nothing is noted down: no interrupt can leave anything behind.
    """
    frame = sys._getframe(1).f_back
    while frame and frame.f_code not in _open:
        if frame.f_code in _alone and frame.f_locals.get("self", owner) is owner:
            raise MismatchError(
                f"{name}: called by the handler of a signal, or a function of a rule, in the middle of another call, "
                "which cannot end before that returns; let the handler set a flag and save in the loop, or pass "
                "save_on_preemption=True to the Checkpointer (or save_on_error=True, where the handler raises)"
            )
        frame = frame.f_back
