"""The interval between saves that loses the least time, given the cost of a save and the rate of failures.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974); J. T. Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006).
"""

import collections
import datetime
import logging
import math
import statistics

from .._save.pending import SaveReport

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
