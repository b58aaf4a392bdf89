"""Taking times so that they can be compared."""

import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

_SLOW_SECONDS = 1.0  # seconds a round
_SLOW_ROUNDS = 2


class Median(float):
    """The median of several rounds. `spread` is half the distance between their quartiles, as a share of it."""

    spread: float | None = None

    @classmethod
    def of(cls, rounds: Sequence[float]) -> "Median":
        found = cls(statistics.median(rounds))
        if len(rounds) > _SLOW_ROUNDS and found:
            low, _, high = statistics.quantiles(rounds, n=4, method="inclusive")
            found.spread = (high - low) / 2 / found
        return found


def slow_rounds(repeats: int) -> int:
    """Returns how many of the rounds those take part in that need seconds for one."""
    return max(1, min(_SLOW_ROUNDS, repeats // 2))


def race(runs: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """The median of what each run returns. They take turns, so that a slow moment of the machine meets all.

    Each round is in another order, so that no contestant always follows the same neighbour. The slow ones skip the
    later rounds: their distance to the others is much larger than the noise.
    """
    names = list(runs)
    order = random.Random(0)
    results: dict[str, list[float]] = {name: [] for name in names}
    spent = dict.fromkeys(names, 0.0)
    for n in range(repeats):
        for name in order.sample(names, len(names)):
            if n >= slow_rounds(repeats) and spent[name] > _SLOW_SECONDS * len(results[name]):
                continue
            begun = time.perf_counter()
            results[name].append(runs[name]())
            spent[name] += time.perf_counter() - begun
    return {name: Median.of(found) for name, found in results.items()}


def seconds(work: Callable[[], object]) -> float:
    """Returns how many seconds `work` takes, without the time to free its result."""
    gc.collect()  # the garbage of earlier runs must not be collected during this one
    begun = time.perf_counter()
    kept = work()
    taken = time.perf_counter() - begun
    del kept
    return taken


def fill_cache(directory: str) -> None:
    """Reads every file, so that the page cache holds it."""
    for path in _files(directory):
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def drop_cache(directory: str) -> None:
    """Takes every file out of the page cache."""
    gc.collect()  # JAX may hold what was mapped for a while, and mapped pages stay
    os.sync()  # only clean pages can be dropped
    for path in _files(directory):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _files(directory: str) -> list[str]:
    return [os.path.join(where, name) for where, _, names in os.walk(directory) for name in names]
