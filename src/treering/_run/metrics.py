"""Metrics of steps: records them after a save, and ranks steps by them. A metric is a named real number."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from .. import formats, stores
from .._core.entries import step_number
from .._core.leaf_paths import name_known
from .._core.tracebacks import hide_internal_frames
from ..errors import MismatchError, NotFoundError, UnsupportedError
from ..formats.treering import summary
from ..keep import Saved, rank
from ..stores.read_errors import reading
from . import new_run
from . import run_layout as _run


@hide_internal_frames
def record(run: str | os.PathLike[str], step: int, metrics: Mapping[str, Any]) -> None:
    """Adds metrics durably to a step that is already saved. A later value of the same name replaces the earlier one.

    Use `Checkpoint.record` for metrics of a checkpoint that was opened before: after a `rewind`, another checkpoint may
    have its number.

    >>> tr.record("runs/gpt", 1000, {"val/loss": 0.5})

    Any job may record metrics, such as an evaluator. `keep.best` and `best_step` of the training job then use them. If
    the process of the training job records them, steps that `keep` no longer wants are deleted, even after it has
    closed its `Checkpointer`. Raises `NotFoundError` if the step does not exist or was deleted, `MismatchError` for a
    value that is not a real scalar, `UnsupportedError` for a step that another library wrote, and `SaveError` if
    writing fails.
    """
    from .._pytree.devices import encode_metrics  # It needs JAX, which a listing of metrics does not.

    place, number, numbers = stores.absolute(run), step_number(step), encode_metrics(metrics)
    store = stores.get(place)
    steps = _run.all_steps(store, place)
    if (path := steps.get(number)) is None:
        why = ("" if steps else new_run.suggest_run(store, place)) or "; was it deleted meanwhile?"
        raise NotFoundError(f"{place}: expected step {number}, found none{why}")
    with reading(path):
        there = summary.stat_manifest(store, path)
    if not there and formats.is_known(store, path):
        raise UnsupportedError(f"{path}: step {number} was written by another library; metrics are not added to it")
    summary.add_metrics(store, path, number, numbers)


def best(saved: Sequence[Saved], metric: str, mode: Literal["min", "max"]) -> int | None:
    """Returns the best step by a metric, or None if no step has metrics. NaN is never best.

    Raises `MismatchError` for a metric that no step has, if steps have other metrics.
    """
    known = {name for one in saved for name in one.metrics}
    if known and metric not in known:
        raise MismatchError(
            f"metric={metric!r}: expected one that a step has, found {name_known(metric, known) or 'no metrics'}"
        )
    numbers = [one for one in saved if not math.isnan(one.metrics.get(metric, math.nan))]
    return next(iter(rank(numbers, metric, mode)), None)
