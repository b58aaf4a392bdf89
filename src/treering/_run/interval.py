"""The interval between saves that loses least time, of what a save costs and how often jobs fail.

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
# Between two unexpected interruptions: 16,384 GPUs had 419 of them in 54 days ("The Llama 3 Herd of Models", 2024).
_DEVICE_HOURS = 50_000
_SAVES, _STEPS = 5, 50  # of which medians are taken
_LEAST_STEPS = 5  # of either kind, before it is believed that they differ
_TOLD = 1.25  # times what was logged last, up or down


class Interval:
    """The seconds between saves, as far as the saves so far show what one costs; 0 before the first.

    A save costs the loop its stall, and what steps take longer while it is written. `mtbf` is the mean time between
    failures of the whole job; None for what many jobs on as many devices have seen.
    """

    def __init__(self, mtbf: datetime.timedelta | None):
        self.seconds = 0.0
        self._mtbf = mtbf
        self._stalls: collections.deque[float] = collections.deque(maxlen=_SAVES)
        self._writes: collections.deque[float] = collections.deque(maxlen=_SAVES)
        self._steps = {saving: collections.deque[float](maxlen=_STEPS) for saving in (False, True)}
        self._told = 0.0

    def step(self, seconds: float, *, saving: bool) -> None:
        """Notes how long a step has taken, all of it while a save was under way or none of it."""
        self._steps[saving].append(seconds)

    def saved(self, report: SaveReport) -> None:
        """Notes what a save has cost, and chooses anew."""
        self._stalls.append(report.stall_seconds - report.wait_seconds)  # no save is waited for when they are far apart
        self._writes.append(report.seconds - report.wait_seconds)
        cost, failure = self._cost(), self._between_failures()
        # A save is not begun before the one before it is over: the loop would only wait for that.
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
    """The seconds of work between two saves with which least time is lost, by Daly's estimate of higher order."""
    ratio = cost / (2 * between_failures)
    if ratio >= 1:
        return between_failures
    return between_failures * 2 * math.sqrt(ratio) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
