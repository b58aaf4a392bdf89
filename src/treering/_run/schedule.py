"""The schedule by which a training loop saves."""

import datetime
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from .._save.pending import SaveReport
from ..errors import MismatchError
from .interval import Interval

SaveEvery = int | datetime.timedelta | tuple[int, datetime.timedelta] | Literal["auto"] | Callable[[int], bool]


class Schedule:
    """Decides which steps are due for a save.

    `by_number` is True if only the step's number decides, so that all processes agree without talking. `busy` returns
    True while a save is under way.
    """

    def __init__(self, save_every: SaveEvery, mtbf: datetime.timedelta | None, busy: Callable[[], bool]):
        self._parts: tuple[Any, ...] = save_every if isinstance(save_every, tuple) else (save_every,)
        kinds = [_kind(part) for part in self._parts]
        if kinds != ["number", "time"] if isinstance(save_every, tuple) else kinds == [None]:
            raise MismatchError(
                f"save_every={save_every!r}: expected a number from 1, a timedelta from 0, (number, timedelta), "
                "'auto' or a function of the step"
            )
        if mtbf is not None and (save_every != "auto" or not mtbf > datetime.timedelta(0)):
            raise MismatchError(f"mtbf={mtbf!r}: expected a timedelta above 0, together with save_every='auto'")
        self.by_number = kinds == ["number"]
        self._interval = Interval(mtbf) if kinds == ["auto"] else None
        self._busy, self._was_busy = busy, False
        self._since = self._looked = time.monotonic()

    def due(self, step: int) -> bool:
        """Returns True if this step is to be saved. Call it once for each step."""
        if self._interval:
            now, busy = time.monotonic(), self._busy()
            if busy == self._was_busy:  # A step that a save began or ended in belongs to neither kind.
                self._interval.step(now - self._looked, saving=busy)
            self._looked, self._was_busy = now, busy
            return not busy and now - self._since >= self._interval.seconds
        return any(self._due(part, step) for part in self._parts)

    def begun(self) -> None:
        """Notes that a save has begun. Intervals of time are measured from here."""
        self._since = self._looked = time.monotonic()
        self._was_busy = True

    def committed(self, report: SaveReport) -> None:
        """Notes the report of a save, from any thread."""
        if self._interval:
            self._interval.saved(report)

    def _due(self, part: Any, step: int) -> bool:
        if isinstance(part, datetime.timedelta):
            return time.monotonic() - self._since >= part.total_seconds()
        return bool(part(step)) if callable(part) else step % int(part) == 0


def _kind(part: Any) -> str | None:
    if isinstance(part, int | np.integer) and not isinstance(part, bool) and part >= 1:
        return "number"
    if isinstance(part, datetime.timedelta) and part >= datetime.timedelta(0):
        return "time"
    if isinstance(part, str) and part == "auto":
        return "auto"
    return "function" if callable(part) else None
