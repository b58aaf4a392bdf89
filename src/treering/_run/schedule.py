"""The schedule by which a training loop saves.

`Interval` is the time between saves that loses the least, given the cost of a save and the rate of failures. J. W.
Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974); J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006).
"""

import collections
import datetime
import logging
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from .._save.pending import SaveReport
from ..errors import MismatchError

_log = logging.getLogger("treering")
# Device-hours between two unexpected interruptions: 16,384 GPUs had 419 of them in 54 days ("The Llama 3 Herd of
# Models", 2024).
_DEVICE_HOURS_PER_FAILURE = 50_000
_MEDIAN_SAVES, _MEDIAN_STEPS = 5, 50  # how many of the newest ones the medians are taken of
_MIN_STEPS = 5  # of each kind, before their medians are compared
_RELOG_RATIO = 1.25  # The interval is logged again once it changes by this factor.


class Interval:
    """Chooses the `seconds` between saves from the cost of the saves so far; 0 before the first save.

    A save costs the loop its stall, and the extra time that steps take while it is written. `mtbf` is the mean time
    between failures of the job; None for the usual rate of failures of this number of devices.
    """

    def __init__(self, mtbf: datetime.timedelta | None):
        self.seconds = 0.0
        self._mtbf = mtbf
        self._stall_seconds: collections.deque[float] = collections.deque(maxlen=_MEDIAN_SAVES)
        self._write_seconds: collections.deque[float] = collections.deque(maxlen=_MEDIAN_SAVES)
        self._step_seconds = {saving: collections.deque[float](maxlen=_MEDIAN_STEPS) for saving in (False, True)}
        self._logged_seconds = 0.0

    def add_step(self, seconds: float, *, saving: bool) -> None:
        """Notes the seconds of a step. A save must have run during all of the step (`saving`) or none of it."""
        self._step_seconds[saving].append(seconds)

    def add_save(self, report: SaveReport) -> None:
        """Notes the cost of a save, and chooses the interval again."""
        # At this interval no save waits for another, and only the first one waits for the lease of the run.
        waited = report.wait_seconds + report.lease_seconds
        self._stall_seconds.append(report.stall_seconds - waited)
        self._write_seconds.append(report.seconds - waited)
        cost, failure = self._cost(), self._seconds_between_failures()
        # The interval is at least the time of a write: a save that begins earlier only waits for the one before.
        self.seconds = max(optimal_interval(cost, failure), statistics.median(self._write_seconds))
        if not self._logged_seconds / _RELOG_RATIO <= self.seconds <= self._logged_seconds * _RELOG_RATIO:
            self._logged_seconds = self.seconds
            _log.info(
                "saving every %.3g s: a save costs the loop %.3g s, and a failure is expected every %.3g hours",
                self.seconds,
                cost,
                failure / 3600,
            )

    def _cost(self) -> float:
        slowdown = 0.0
        if min(map(len, self._step_seconds.values())) >= _MIN_STEPS:
            idle, busy = (statistics.median(self._step_seconds[saving]) for saving in (False, True))
            slowdown = max(0.0, 1 - idle / busy) if busy else 0.0
        return statistics.median(self._stall_seconds) + slowdown * statistics.median(self._write_seconds)

    def _seconds_between_failures(self) -> float:
        if self._mtbf is not None:
            return self._mtbf.total_seconds()
        import jax

        return _DEVICE_HOURS_PER_FAILURE * 3600 / jax.device_count()


def optimal_interval(cost: float, seconds_between_failures: float) -> float:
    """Returns the seconds of work between two saves that lose the least time, by Daly's higher order estimate."""
    ratio = cost / (2 * seconds_between_failures)
    if ratio >= 1:
        return seconds_between_failures
    return seconds_between_failures * 2 * math.sqrt(ratio) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


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
                f"save_every={save_every!r}: expected an integer from 1, a timedelta from 0, (integer, timedelta), "
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
