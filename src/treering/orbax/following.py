"""Waits for the steps that another job saves."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from .._run.follow import follow
from .._run.run_layout import steps
from .hints import warn_unused


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    *,
    min_interval_secs: float = 0,
    seconds_to_sleep: float = 1,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    step_name_format: Any = None,
    **snapshots: Any,
) -> Iterator[int]:
    """Yields the newest step of a run whenever there is a new one. Steps that came in between are left out.

    timeout: seconds without a new step, after which the iterator ends; with a `timeout_fn` only if that returns True.
    seconds_to_sleep, step_prefix, step_format_fixed_length, step_name_format: not needed; Treering looks every half
        second, and finds the names of steps.

    snapshot_dir, set_immutable, ignore_snapshot_errors: have no effect, which is logged. An open step can be read even
        after it is deleted.
    """
    _warn_of_snapshots("checkpoints_iterator", snapshots)
    last: int | None = None
    while True:
        step = _next_step(checkpoint_dir, last, timeout)
        if step is None:
            if timeout_fn is not None and not timeout_fn():
                continue
            return
        begun = time.monotonic()
        yield step
        last = step
        time.sleep(max(0.0, min_interval_secs - (time.monotonic() - begun)))


@contextlib.contextmanager
def wait_for_new_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    *,
    until_step: int | None = None,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    seconds_to_sleep: float = 1,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    step_name_format: Any = None,
    **snapshots: Any,
) -> Iterator[int]:
    """Waits for the first step, or for one from `until_step` on, and yields it; -1 after the timeout."""
    _warn_of_snapshots("wait_for_new_checkpoint", snapshots)
    after = None if until_step is None else until_step - 1
    while (step := _next_step(checkpoint_dir, after, timeout)) is None:
        if timeout_fn is None or timeout_fn():
            break
    yield -1 if step is None else step


def _next_step(run: str | os.PathLike[str], after: int | None, timeout: float | None) -> int | None:
    """Waits for a step later than `after`, and returns the newest; None after the timeout."""
    before_first = after is None or after < 0
    for ckpt in follow(run, after=None if before_first else after, timeout=timeout, newest=True):
        return max([*steps(run), *([] if ckpt.step is None else [ckpt.step])])
    return None


def _warn_of_snapshots(owner: str, options: dict[str, Any]) -> None:
    known = {"snapshot_dir": None, "set_immutable": None, "ignore_snapshot_errors": True}
    if unknown := options.keys() - known.keys():
        raise TypeError(f"unexpected arguments: {', '.join(sorted(unknown))}")
    warn_unused(owner, **{name: (value, known[name]) for name, value in options.items()})
