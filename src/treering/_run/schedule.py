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
    True while a save is under way. `seconds_since_commit` returns the age of the run's last step, if that is known.
    """

    def __init__(self, save_every: SaveEvery, mtbf: datetime.timedelta | None, busy: Callable[[], bool]):
        self._criteria: tuple[Any, ...] = save_every if isinstance(save_every, tuple) else (save_every,)
        kinds = [_kind_of(criterion) for criterion in self._criteria]
        if kinds != ["number", "time"] if isinstance(save_every, tuple) else kinds == [None]:
            raise MismatchError(
                f"save_every={save_every!r}: expected a number from 1, a timedelta from 0, (number, timedelta), "
                "'auto' or a function of the step"
            )
        if mtbf is not None and (save_every != "auto" or not mtbf > datetime.timedelta(0)):
            raise MismatchError(f"mtbf={mtbf!r}: expected a timedelta above 0, together with save_every='auto'")
        self.by_number = kinds == ["number"]
        self._interval = Interval(mtbf) if kinds == ["auto"] else None
        self.seconds_since_commit: Callable[[], float | None] | None = None
        self._busy, self._was_busy = busy, False
        self._last_save_time = self._last_check_time = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Returns True if this step is to be saved. Call it once for each step."""
        if self._interval:
            now, busy = time.monotonic(), self._busy()
            if busy == self._was_busy:  # A step that a save began or ended in belongs to neither kind.
                self._interval.add_step(now - self._last_check_time, saving=busy)
            self._last_check_time, self._was_busy = now, busy
            return not busy and now - self._last_save_time >= self._interval.seconds
        return any(self._is_due(criterion, step) for criterion in self._criteria)

    def on_save_started(self) -> None:
        """Notes that a save has begun. Intervals of time are measured from here."""
        self._last_save_time = self._last_check_time = time.monotonic()
        self.seconds_since_commit = None
        self._was_busy = True

    def on_commit(self, report: SaveReport) -> None:
        """Notes the report of a save, from any thread."""
        if self._interval:
            self._interval.add_save(report)

    def _count_from_last_commit(self) -> None:
        """Counts from the last commit of an earlier job, once, so that short jobs save, too. Never counts from later.

        The clock of the file system or of another host may differ from that of this process, even by days.
        """
        since, self.seconds_since_commit = self.seconds_since_commit, None
        if since is not None and (age := since()) is not None and age > 0:
            self._last_save_time = min(self._last_save_time, time.monotonic() - age)

    def _is_due(self, criterion: Any, step: int) -> bool:
        if isinstance(criterion, datetime.timedelta):
            self._count_from_last_commit()
            return time.monotonic() - self._last_save_time >= criterion.total_seconds()
        return bool(criterion(step)) if callable(criterion) else step % int(criterion) == 0


def _kind_of(criterion: Any) -> str | None:
    if isinstance(criterion, int | np.integer) and not isinstance(criterion, bool) and criterion >= 1:
        return "number"
    if isinstance(criterion, datetime.timedelta) and criterion >= datetime.timedelta(0):
        return "time"
    if isinstance(criterion, str) and criterion == "auto":
        return "auto"
    return "function" if callable(criterion) else None
