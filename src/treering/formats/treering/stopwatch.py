"""Measures how long each part of a save takes in one process."""

import time


class Stopwatch:
    """The seconds that a process spends on each part of a save."""

    def __init__(self) -> None:
        self.seconds = {"write": 0.0, "sync": 0.0, "commit": 0.0}
        self.begin()

    def begin(self) -> None:
        """Begins a lap."""
        self._since = time.perf_counter()

    def lap(self, what: str) -> None:
        """Adds the time since the last lap to a part of the save."""
        now = time.perf_counter()
        self.seconds[what] += now - self._since
        self._since = now
