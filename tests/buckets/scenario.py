"""Scenarios: what jobs do with a bucket, and what must hold after each of their requests."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import treering as tr

_SIZE, LARGE = 9, 40_000  # elements; objects of the second size are uploaded in the background
KEPT = tr.keep.last(2)
LAST = 90  # the step that the last job saves

Reports = Sequence[tuple[int, Any]]  # the number of a job, from 1 on, and what its user relies on


class Scenario(NamedTuple):
    """Jobs that write to the same place, a last job that runs after them, and the checks.

    A job is a function. It gets a `Job`, and arguments that all jobs share: the place, which is a URL, and a local
    folder. With several `processes`, each process of the job calls it.

    check: must hold at every moment.
    over: must hold before the last job. It gets the error of the first job and the number of faults.
    end: must hold after the last job.
    """

    jobs: Sequence[Callable[..., None]]  # the last one runs after the others, without faults
    check: Callable[[str, Reports], None]
    end: Callable[[str, Reports], None]
    before: Callable[[str, str], None] = lambda place, local: None
    over: Callable[[str, str | None, int], None] = lambda place, error, faults: None
    processes: int = 1  # of each job


def tree(value: int, size: int = _SIZE) -> dict[str, Any]:
    return {"w": np.full(size, value)}


def with_frozen(value: int) -> dict[str, Any]:
    """Returns a tree with an array that has the same values at each step, and is large enough to be copied."""
    return {"frozen": np.full(140_000, 7.0), **tree(value)}


def weights(value: int) -> dict[str, Any]:
    """Returns a version of published weights, of which few elements are others than in the one before."""
    return {**tree(value), "few": np.where(np.arange(300) < 3, value, 0)}


def read_value(place: str, step: int | None = None) -> int:
    """Returns the value of a checkpoint. Asserts that all its elements are equal."""
    found = tr.restore(place, step=step) if step is not None else tr.restore(place)
    array = found["w"]
    assert np.all(found.get("frozen", 7.0) == 7.0)
    assert array.shape in ((_SIZE,), (LARGE,)) and (array == array[0]).all(), array
    if "few" in found:
        assert np.array_equal(found["few"], weights(int(array[0]))["few"]), found
    return int(array[0])
