"""The schedule by which a training loop saves."""

import datetime
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import MismatchError

SaveEvery = int | datetime.timedelta | tuple[int, datetime.timedelta] | Callable[[int], bool]


class Schedule:
    """Says whether a step is due; `by_number`: the step's number alone decides, so that all processes agree."""

    def __init__(self, save_every: SaveEvery):
        self._parts: tuple[Any, ...] = save_every if isinstance(save_every, tuple) else (save_every,)
        kinds = [_kind(part) for part in self._parts]
        if kinds != ["number", "time"] if isinstance(save_every, tuple) else kinds == [None]:
            raise MismatchError(
                f"save_every={save_every!r}: expected a number from 1, a timedelta from 0, (number, timedelta), "
                "or a function of the step"
            )
        self.by_number = kinds == ["number"]
        self.saved()

    def due(self, step: int) -> bool:
        """Whether to save this step."""
        return any(self._due(part, step) for part in self._parts)

    def saved(self) -> None:
        """Notes that a save begins: intervals of time count from here."""
        self._since = time.monotonic()

    def _due(self, part: Any, step: int) -> bool:
        if isinstance(part, datetime.timedelta):
            return time.monotonic() - self._since >= part.total_seconds()
        return bool(part(step)) if callable(part) else step % int(part) == 0


def _kind(part: Any) -> str | None:
    if isinstance(part, int | np.integer) and not isinstance(part, bool) and part >= 1:
        return "number"
    if isinstance(part, datetime.timedelta) and part >= datetime.timedelta(0):
        return "time"
    return "function" if callable(part) else None
