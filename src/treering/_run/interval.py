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
_DEVICE_HOURS = 50_000
_SAVES, _STEPS = 5, 50  # how many of the newest ones the medians are taken of
_LEAST_STEPS = 5  # of each kind, before their medians are compared
_TOLD = 1.25  # The interval is logged again once it changes by this factor.


class Interval:
    """Chooses the `seconds` between saves from the cost of the saves so far; 0 before the first save.

    A save costs the loop its stall, and the extra time that steps take while it is written. `mtbf` is the mean time
    between failures of the job; None for the usual rate of failures of this number of devices.
    """

    def __init__(self, mtbf: datetime.timedelta | None):
        self.seconds = 0.0
        self._mtbf = mtbf
        self._stalls: collections.deque[float] = collections.deque(maxlen=_SAVES)
        self._writes: collections.deque[float] = collections.deque(maxlen=_SAVES)
        self._steps = {saving: collections.deque[float](maxlen=_STEPS) for saving in (False, True)}
        self._told = 0.0

    def step(self, seconds: float, *, saving: bool) -> None:
        """Notes the seconds of a step. A save must have run during all of the step (`saving`) or none of it."""
        self._steps[saving].append(seconds)

    def saved(self, report: SaveReport) -> None:
        """Notes the cost of a save, and chooses the interval again."""
        self._stalls.append(report.stall_seconds - report.wait_seconds)  # At this interval no save waits for another.
        self._writes.append(report.seconds - report.wait_seconds)
        cost, failure = self._cost(), self._between_failures()
        # The interval is at least the time of a write: a save that begins earlier only waits for the one before.
        self.seconds = max(optimum(cost, failure), statistics.median(self._writes))
        if not self._told / _TOLD <= self.seconds <= self._told * _TOLD:
            self._told = self.seconds
            _log.info(
                "saving every %.3g s: a save costs the loop %.3g s, and a failure is expected every %.3g hours",
                self.seconds,
                cost,
                failure / 3600,
            )

    def _cost(self) -> float:
        slower = 0.0
        if min(map(len, self._steps.values())) >= _LEAST_STEPS:
            idle, busy = (statistics.median(self._steps[saving]) for saving in (False, True))
            slower = max(0.0, 1 - idle / busy) if busy else 0.0
        return statistics.median(self._stalls) + slower * statistics.median(self._writes)

    def _between_failures(self) -> float:
        if self._mtbf is not None:
            return self._mtbf.total_seconds()
        import jax

        return _DEVICE_HOURS * 3600 / jax.device_count()


def optimum(cost: float, between_failures: float) -> float:
    """Returns the seconds of work between two saves that lose the least time, by Daly's higher order estimate."""
    ratio = cost / (2 * between_failures)
    if ratio >= 1:
        return between_failures
    return between_failures * 2 * math.sqrt(ratio) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
