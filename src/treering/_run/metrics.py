"""Metrics: named real numbers that say how good a checkpoint is."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from .. import formats, stores
from .._core.entries import step_number
from .._core.leaf_paths import few
from .._core.tracebacks import at_the_caller
from .._save.metrics import encoded
from ..errors import MismatchError, NotFoundError, SaveError, UnsupportedError
from ..formats.treering import summary
from ..keep import Saved, rank
from ..stores.read_errors import reading
from ..stores.store import Store
from . import late_metrics, new_run
from . import run as _run


@at_the_caller
def record(run: str | os.PathLike[str], step: int, metrics: Mapping[str, Any]) -> None:
    """Adds metrics to a step that is saved already, durably; of those with one name the last counts.

    >>> tr.record("runs/gpt", 1000, {"val/loss": 0.5})

    Any job may do so, such as an evaluator; `keep.best` and `best_step` of the training job then know them. In the
    process of that job, even after it has closed its `Checkpointer`, steps that `keep` no longer wants are deleted.
    Raises `NotFoundError` when there is no such step (any more), `MismatchError` for anything but a real scalar,
    `UnsupportedError` for a step that another library wrote; `SaveError` when writing fails.
    """

    place, number, numbers = stores.absolute(run), step_number(step), encoded(metrics)
    store = stores.of(place)
    steps = _run.all_steps(store, place)
    if (path := steps.get(number)) is None:
        why = ("" if steps else new_run.meant(store, place)) or "; was it deleted meanwhile?"
        raise NotFoundError(f"{place}: expected step {number}, found none{why}")
    _write(store, path, number, numbers)
    late_metrics.arrived(place)


def _write(store: Store, path: str, step: int, numbers: Mapping[str, float | str]) -> None:
    with reading(path):
        there = summary.look(store, path)
    if not there and formats.is_known(store, path):
        raise UnsupportedError(f"{path}: step {step} was written by another library; metrics are not added to it")
    try:
        summary.add_metrics(store, path, numbers)
    except FileNotFoundError:
        raise NotFoundError(f"{path}: expected step {step}, but it was deleted meanwhile") from None
    except OSError as error:
        raise SaveError(f"{path}: the metrics cannot be added: {error}") from error


def best(saved: Sequence[Saved], metric: str, mode: Literal["min", "max"]) -> int | None:
    """Returns the step that is best by a metric, or None if no step has metrics. NaN is never best.

    Raises `MismatchError` for a metric that no step has, where steps have others.
    """
    known = sorted({name for one in saved for name in one.metrics})
    if known and metric not in known:
        raise MismatchError(f"metric={metric!r}: expected one that a step has, found {few(tuple(known))}")
    numbers = [one for one in saved if not math.isnan(one.metrics.get(metric, math.nan))]
    return next(iter(rank(numbers, metric, mode)), None)
