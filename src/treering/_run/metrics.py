"""Metrics of steps: records them after a save, and ranks steps by them. A metric is a named real number.

`keep.best` can judge a step only once it has its metrics. So retention is applied again when they come late, or when a
job resumes. Only a process with a `Checkpointer` of the run deletes steps: restoring alone deletes nothing, because
another job may have restored a step that the policy does not keep.
"""

import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from .. import formats, stores
from .._core.entries import mode_hint, step_number
from .._core.leaf_paths import name_known
from .._core.tracebacks import hide_internal_frames
from .._processes import coordinator
from .._threads.forks import WeakRegistry, free_in_children
from ..errors import ExistsError, MismatchError, NotFoundError, UnsupportedError
from ..formats.treering import summary
from ..keep import Saved, rank
from ..stores.read_errors import reading
from . import new_run
from . import run_layout as _run
from .pending_saves import PendingSaves
from .plain_run import PlainRun
from .retention import Retention

_log = logging.getLogger("treering")


class LateMetrics:
    """Applies the policy of one `Checkpointer` to metrics that threads of this process record.

    Metrics that another process records wait for the next save, `close` or `restore_or_init` of the job.
    `retention` is that of the remote tier, or of the run's only directory. With a local tier, `start_upload` begins an
    upload, which ends with retention.
    """

    def __init__(
        self,
        directory: PlainRun,
        retention: Retention,
        pending_saves: PendingSaves,
        start_upload: Callable[[], None] | None,
    ):
        self.closed = False
        self.directory, self._retention, self._pending_saves, self._start_upload = (
            directory,
            retention,
            pending_saves,
            start_upload,
        )
        self._lock = free_in_children(threading.Lock())  # several threads may record at a time
        self.pid = os.getpid()
        self.real_root = directory.steps.store.real_path(directory.root)
        _instances.add(self)
        _newest[self.real_root] = weakref.ref(self)

    def on_resume(self, step: int) -> None:
        """Applies the policy when a job continues from a step. Does nothing if saves and `close` apply it already."""
        if not self.directory.has_held_lock:
            self._acquire_and_retain(step)

    def apply_late_metrics(self) -> None:
        """Applies the policy when a step has got metrics. While a save is running, that save applies it."""
        self.directory.steps.look_again()
        with self._lock:
            if not self.directory.is_held:
                self._acquire_and_retain()
            elif self._start_upload:
                self._start_upload()
            elif not self._pending_saves.busy():
                with self._pending_saves.changing_run():
                    self._retention.retain_late(self._pending_saves.check_no_save)

    def _acquire_and_retain(self, step: int | None = None) -> None:
        """Applies the policy with the lease, only if a step has to be deleted and no other process has the lease."""
        directory, same_run = self.directory, _checkpointers_of(self.directory.root)
        if directory.lost or directory.back_to is not None or any(one.directory.is_held for one in same_run):
            return
        if coordinator.process_index_and_count()[0] != 0:  # Process 0 decides for all.
            return
        needed = {step}.union(*(one.directory.protected_steps() for one in same_run if not one.closed))
        try:
            if self._retention.has_late_metrics(needed):
                with self._pending_saves.changing_run():
                    directory.acquire()
                    try:
                        self._retention.retain(*needed)
                        self._retention.wait()
                    finally:
                        directory.release()
        except ExistsError as error:
            _log.info("%s: late metrics are left to the job that writes the run: %s", directory.root, error)
        except Exception as error:  # A policy may be the user's code, and the caller has only read.
            _log.warning("%s: steps that late metrics rule out are not deleted yet: %s", directory.root, error)


_instances: WeakRegistry[LateMetrics] = WeakRegistry()
# The newest Checkpointer of each run. Its entry stays when it is collected, so that no earlier policy applies again.
_newest: dict[str, weakref.ref[LateMetrics]] = {}


def _real_root(root: str) -> str:
    """Returns the one path of a run; links may give it several."""
    return stores.get(root).real_path(root)


def _checkpointers_of(root: str) -> list[LateMetrics]:
    """Returns the LateMetrics of the Checkpointers of a run that this process has made and that still exist."""
    real_root = _real_root(root)
    return [one for one in _instances.all() if one.real_root == real_root and one.pid == os.getpid()]


def _apply_late_metrics(root: str) -> None:
    """Applies the policy after a step of a run got metrics.

    Uses the policy of the Checkpointer of this process that writes the run. Otherwise the newest one decides: its
    policy applies if it has written the run and is closed. If it was collected, no step is deleted.
    """
    same_run = _checkpointers_of(root)
    newest = _newest.get(_real_root(root), lambda: None)()
    writing = [one for one in same_run if one.directory.is_held]
    for one in writing or [one for one in same_run if one is newest and one.closed and one.directory.has_held_lock]:
        one.apply_late_metrics()


summary.listeners.append(_apply_late_metrics)


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
        meant = "" if steps else new_run.suggest_path(store, place) or new_run.suggest_run(store, place)
        why = meant or ("; was it deleted meanwhile?" if steps else "; the run has no steps")
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
        found = name_known(metric, known) or "no metrics"
        raise MismatchError(f"metric={metric!r}: expected one that a step has, found {found}{mode_hint(metric)}")
    numbers = [one for one in saved if not math.isnan(one.metrics.get(metric, math.nan))]
    return next(iter(rank(numbers, metric, mode)), None)
