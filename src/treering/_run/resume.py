"""Resumes a run: all processes restore the same step, the latest valid one or the requested one."""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from .. import stores
from .._core import expansion
from .._core.calls import Call
from .._core.entries import metric_and_mode
from .._processes import consistency
from .._restore.checkpoint import Checkpoint
from .._restore.policy import Policy
from .._save.pending import wait_for_saves_in
from ..errors import NotFoundError, TreeringError
from ..formats.treering import summary
from ..stores.nfs import refresh_dir_cache
from ..stores.read_errors import reading
from . import new_run
from .collective import CollectiveCalls
from .run_directory import RunDirectory
from .step_fallback import StepCopy, use_valid

T = TypeVar("T")
_log = logging.getLogger("treering")


def has_steps(directory: RunDirectory) -> bool:
    """Returns True if the run has a step.

    Raises `MismatchError` if the directory is a checkpoint and therefore not a run, and `UnsupportedError` if
    directories of steps cannot be read.
    """
    if steps := directory.all_steps():
        newest: int = next(reversed(steps))  # type: ignore[assignment]
        catalog = directory.steps
        new_run.warn_of_newer_steps(catalog.store, catalog.root, catalog.prefix, steps[newest])
        return True
    directory.check_new()
    return False


def has_begun_for_all(collective: CollectiveCalls, directory: RunDirectory) -> bool:
    """Returns the same as `has_steps` in all processes, once every save is over."""
    wait_for_saves_in(directory.steps.root)
    with collective.call("restore_or_init()") as call:
        collective.wait_for_saves(call)
        found = call.broadcast(lambda: has_steps(directory))
        call.close()
    return found


def begin(root: str, init: Callable[[], Any], sharding: Any, options: Mapping[str, Any]) -> Any:
    """Returns the state that `init` makes for a run without steps. See `Checkpointer.restore_or_init`."""
    from .._restore import initial

    _log.info("%s: there is no step, so the run begins with init()", root)
    _check(options)  # Also in the first job, so that a wrong option does not fail only the second.
    if isinstance(sharding, str) and sharding == "saved":  # Nothing is saved yet.
        sharding = None
    return initial.first_state(init, sharding)


def _check(options: Mapping[str, Any]) -> None:
    """Raises `MismatchError` for options of `treering.restore` that every restore would refuse."""
    allowed = {name: options[name] for name in ("missing", "extra", "dtype", "grow") if name in options}
    Policy(**allowed)
    expansion.check_bound(options.get("max_expansion", expansion.MAX_RATIO))


def seconds_since_commit(directory: RunDirectory) -> float | None:
    """Returns how long ago the last step was committed, by the times of its files, or None if that is unknown."""
    with contextlib.suppress(TreeringError, OSError):  # The next save raises the error if it is still there.
        with reading(directory.root):
            if (step := directory.newest_step()) is None:
                return None
            path = directory.path(step)
            store = stores.get(path)
            found = summary.stat_manifest(store, path) or store.stat(path)
        if found and found.modified > 0:  # A folder in a bucket may have no time.
            age = time.time() - found.modified
            _log.info("%s: step %d was committed %.0f s ago", directory.root, step, age)
            return age
    return None


def open_step(directory: RunDirectory, step: int | None) -> Checkpoint:
    """Opens a step, by default the latest valid one. See `Checkpointer.open`."""
    wait_for_saves_in(directory.steps.root)
    find = functools.partial(directory.readable_copies, step)
    return use_valid(directory.root, find, lambda ckpt: ckpt, fallback=step is None)[1]


def restore(
    what: str,
    collective: CollectiveCalls,
    directory: RunDirectory,
    like: Any,
    step: int | None,
    best: str | None,
    fallback: bool,
    options: Mapping[str, Any],
) -> Any:
    """Waits for every save, restores a step, and notes it in the directory. `what` names the call.

    Returns the tree. See `Checkpointer.restore`.
    """
    number, tree = use_step(
        what, collective, directory, step, fallback, lambda ckpt, call: ckpt._restore(like, call, **options), best=best
    )
    directory.restored_step = number
    directory.back_to = None if step is None and best is None else number
    return tree


def use_step(
    what: str,
    collective: CollectiveCalls,
    directory: RunDirectory,
    step: int | None,
    fallback: bool,
    use: Callable[[Checkpoint, Call], T],
    *,
    best: str | None = None,
) -> tuple[int, T]:
    """Waits for every save, opens a step, by default the latest, and returns its number and the result of `use`.

    best: opens the best step by a metric, as `treering.open` does.

    All processes make the call and use the same step. With `fallback` and neither a step nor `best`, a damaged step is
    logged, and the one before it is used.
    """
    wait_for_saves_in(directory.steps.root)
    with collective.call(what) as call:
        collective.wait_for_saves(call)
        call.set_activity("restoring")
        uploads = directory.uploads
        if uploads:
            uploads.begin_restore(call)
        try:
            number, result = _use_valid(call, directory, step, best, fallback, use)
        finally:
            if uploads:
                uploads.end_restore()
        call.close()
    return number, result


def _use_valid(
    call: Call,
    directory: RunDirectory,
    step: int | None,
    best: str | None,
    fallback: bool,
    use: Callable[[Checkpoint, Call], T],
) -> tuple[int, T]:

    def own_copies() -> Iterable[StepCopy]:
        return directory.readable_copies(step if best is None else _best_step(directory, best))

    def list_copies() -> list[tuple[int, str, str | None]]:
        return [(place.step, place.path, place.format) for place in own_copies()]

    def find_copies() -> Iterable[StepCopy]:
        if call.count == 1:
            return own_copies()
        found = [directory.copy_at(*one) for one in call.broadcast(list_copies)]
        # A network file system may show another host's new step late: refresh its cache.
        if found and call.index and summary.stat_manifest(found[0].store, found[0].path) is None:
            refresh_dir_cache(found[0].store, found[0].path)
        return found

    number, (_, result) = use_valid(
        directory.root,
        find_copies,
        lambda ckpt: (ckpt._source.identity, use(ckpt, call)),
        fallback=fallback and step is None and best is None,
        on_damaged=directory.mark_damaged,
        on_all_processes=functools.partial(consistency.attempt_on_all_processes, call),
    )
    return number, result


def _best_step(directory: RunDirectory, best: str) -> int:
    """Returns the best valid step. Raises `MismatchError` for a metric that no step has."""
    from . import metrics  # It imports NumPy, which a run without metrics does not need.

    metric, mode = metric_and_mode(best)
    found = metrics.best(directory.valid_steps(foreign=True), metric, mode)
    if found is None:
        raise NotFoundError(f"{directory.root}: expected a step with the metric {metric!r}, found no metrics")
    _log.info("%s: step %d has the best %s", directory.root, found, metric)
    return found
