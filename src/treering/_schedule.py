"""When a training loop saves."""

import datetime
import time
from collections.abc import Callable

import numpy as np

from .errors import MismatchError

SaveEvery = int | datetime.timedelta | Callable[[int], bool]


class Schedule:
    """Says whether a step is due; `by_number` that its number alone decides, so that all processes say the same."""

    def __init__(self, save_every: SaveEvery):
        number = not isinstance(save_every, bool) and isinstance(save_every, int | np.integer) and save_every >= 1
        if not (number or isinstance(save_every, datetime.timedelta) or callable(save_every)):
            raise MismatchError(f"save_every={save_every!r}: expected a number from 1, a timedelta or a function")
        self._every = int(save_every) if isinstance(save_every, int | np.integer) else save_every
        self.by_number = isinstance(self._every, int)
        self.saved()

    def due(self, step: int) -> bool:
        """Whether to save this step."""
        if isinstance(self._every, int):
            return step % self._every == 0
        if isinstance(self._every, datetime.timedelta):
            return time.monotonic() - self._since >= self._every.total_seconds()
        return bool(self._every(step))

    def saved(self) -> None:
        """A save begins: intervals of time count from here."""
        self._since = time.monotonic()
