"""Refuses calls in the middle of another call of the same thread, which would wait for it forever.

A signal handler or the function of a rule can make such a call.
"""

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

from ..errors import MismatchError

_non_reentrant_codes: set[CodeType] = set()
_reentrant_codes: set[CodeType] = set()

F = TypeVar("F", bound=Callable[..., Any])


def non_reentrant(function: F) -> F:
    """Marks a function, or a method of an object that writes a run, during which no other call may be made."""
    _non_reentrant_codes.add(function.__code__)
    return function


def runs_user_code(function: F) -> F:
    """Marks a function that calls the user's code. That code may make other calls, because none has to wait for it."""
    _reentrant_codes.add(function.__code__)
    return function


def refuse_reentry(name: str, owner: object = None) -> None:
    """Raises `MismatchError` if this call was made in the middle of a function that `non_reentrant` marks.

    The calling function would wait for that function, which cannot continue before the signal handler, or the function
    of a rule, has returned. Methods count only if they are those of `owner`. Containers that flatten themselves, and
    iterators that return their state, may make calls of their own; see `runs_user_code`.

    This looks at the stack and keeps no record, so an interrupt can leave nothing behind.
    """
    frame = sys._getframe(1).f_back
    while frame and frame.f_code not in _reentrant_codes:
        if frame.f_code in _non_reentrant_codes and frame.f_locals.get("self", owner) is owner:
            raise MismatchError(
                f"{name}: called by the handler of a signal, or a function of a rule, in the middle of another call, "
                "which cannot end before that returns; let the handler set a flag and save in the loop, or pass "
                "save_on_preemption=True to the Checkpointer (or save_on_error=True, where the handler raises)"
            )
        frame = frame.f_back
