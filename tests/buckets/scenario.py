"""What a scenario is: what jobs do with a bucket, and what must hold after every request of theirs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import treering as tr

_SIZE, LARGE = 9, 40_000  # elements; objects of the second size go on their way in the background
KEPT = tr.keep.last(2)
LAST = 90  # the step that the job after all others saves

Reports = Sequence[tuple[int, Any]]  # the number of a job, from 1 on, and what its user was told


class Scenario(NamedTuple):
    """Jobs that each write at a place, and the one that comes after them; `check` is to hold at every moment.

    A job is called with a `Job`, and arguments that all jobs share: the place, a URL, and a local folder. With several
    `processes` each of them is.
    `over` is what must hold before the last job, with the error of the first one and the number of faults; `end` when
    the last one is over.
    """

    jobs: Sequence[Callable[..., None]]  # the last one comes when the others are over, and nothing fails in it
    check: Callable[[str, Reports], None]
    end: Callable[[str, Reports], None]
    before: Callable[[str, str], None] = lambda place, local: None
    over: Callable[[str, str | None, int], None] = lambda place, error, faults: None
    processes: int = 1  # of each job


def tree(value: int, size: int = _SIZE) -> dict[str, Any]:
    return {"w": np.full(size, value)}


def read_value(place: str, step: int | None = None) -> int:
    """The value of a checkpoint, whole and verified."""
    array = tr.restore(place, step=step)["w"] if step is not None else tr.restore(place)["w"]
    assert array.shape in ((_SIZE,), (LARGE,)) and (array == array[0]).all(), array
    return int(array[0])
