"""Chooses the step of a run to read: the newest valid one. Skips damaged steps.

Opens a step again if it is overwritten while it is read.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from .. import formats, stores
from .._core.entries import step_number
from .._core.leaf_paths import join_names
from .._restore.checkpoint import Checkpoint
from ..errors import CorruptError, MismatchError, NotFoundError, TreeringError, UnsupportedError
from ..formats.treering import summary
from ..stores.read_errors import READ_ATTEMPTS, ReplacedError, reading
from ..stores.store import Store
from . import new_run
from .run_layout import Steps, located_steps

T = TypeVar("T")
_log = logging.getLogger("treering")


class OneCheckpoint(NamedTuple):
    """A checkpoint that is not a step of a run. `opened` has it if it is open already."""

    store: Store
    path: str
    format: str | None
    opened: Checkpoint | None = None


class StepCopy(NamedTuple):
    """A copy of a step. A step may have several, in different stores."""

    step: int
    store: Store
    path: str
    format: str | None = None  # the name of the format; None if opening detects it


def open_in_store(store: Store, path: str, format: str | None = None) -> Checkpoint:
    """Opens a checkpoint in the named format, or detects the format.

    Raises `ReplacedError` if it was deleted meanwhile.
    """
    try:
        with reading(path), store.glance(path):
            reader = (_detect_format(store, path).open if format is None else formats.get(format).open)(store, path)
            reader.check_present()
            reader.metrics  # noqa: B018 (some readers read them on first use)
    except FileNotFoundError as error:
        if isinstance(error, TreeringError):
            raise
        check_format(store, path, format)
        raise ReplacedError(f"{path}: deleted or replaced while it was opened; open it again") from error
    except OSError as error:
        if isinstance(error, TreeringError):
            raise
        check_format(store, path, format)
        raise
    return Checkpoint(reader)


def check_format(store: Store, path: str, format: str | None) -> None:
    """Raises `UnsupportedError` if a format is named and the path holds something else."""
    if format is not None and store.stat(path) is not None and (reason := formats.get(format).refuses(store, path)):
        raise UnsupportedError(f"{path}: expected a checkpoint of the format {format!r}: {reason}")


def _detect_format(store: Store, path: str) -> formats.Format:
    try:
        return formats.detect(store, path)
    # No format knows it. Opening it as native raises the precise error, such as that it is gone.
    except UnsupportedError:
        return formats.get("treering")


def newest_first(store: Store, steps: Steps[formats.StepPath] | dict[int, formats.StepPath]) -> Iterator[StepCopy]:
    """Yields the steps, the newest first. Looks at the others only when it is asked for them."""
    return (StepCopy(number, store, *steps[number]) for number in reversed(steps))


def find_step_copies(
    store: Store, place: str, step: int | None, format: formats.Format | None = None, prefix: str | None = None
) -> Iterator[StepCopy] | OneCheckpoint:
    """Returns the steps at a path that may be read, newest first, or the one checkpoint that the path is.

    format: reads the path in this format, and ignores steps of other formats. prefix: the beginning of the names of a
        run's steps; with a prefix the path must be a run.
    """
    is_native = summary.stat_manifest(store, place) is not None
    if is_native and prefix is None and step is None and format is None:
        return OneCheckpoint(store, place, "treering")
    found = None if is_native else located_steps(store, place, prefix, only=format)
    if not found:
        if prefix is not None:
            meant = new_run.suggest_run(store, place)
            raise NotFoundError(
                f"{place}: expected a run with steps whose names begin with {prefix!r}, found none{meant}"
            )
        if format is not None and not is_native and not formats.accepts(format, store, place):
            _check_no_other_steps(store, place, format.name)
        format = detect_or_explain(store, place) if format is None else check_exists(store, place, format)
        if step is not None:
            meant = new_run.suggest_run(store, place)
            raise MismatchError(f"{place}: step={step} was asked for, but this is one checkpoint, not a run{meant}")
        return OneCheckpoint(store, place, format.name)
    if step is None:
        return newest_first(store, found)
    number = step_number(step)
    if number not in found:
        raise NotFoundError(f"{place}: expected step {number}, found {', '.join(map(str, list(found)[-5:]))}")
    return iter([StepCopy(number, store, *found[number])])


def _check_no_other_steps(store: Store, place: str, format: str) -> None:
    """Raises `NotFoundError` for a run whose steps have other formats than the one that the caller names."""
    if steps := located_steps(store, place):
        others = join_names(tuple(sorted({one.format or "treering" for one in steps.values()})))
        raise NotFoundError(f"{place}: expected steps of the format {format!r}, found only steps of {others}")


def check_exists(store: Store, place: str, format: formats.Format) -> formats.Format:
    """Returns the format that the caller has given. Raises `NotFoundError` if there is neither a file nor a folder."""
    if store.stat(place) is None and not formats.accepts(format, store, place):
        raise not_found(store, place)
    return format


def not_found(store: Store, place: str) -> NotFoundError:
    """Returns the error of a path where there is nothing."""
    meant = new_run.suggest_path(store, place)
    return NotFoundError(f"{place}: expected a checkpoint or a run, found nothing{meant}")


def detect_or_explain(store: Store, place: str) -> formats.Format:
    """Returns the format of the checkpoint at a path.

    Raises `NotFoundError`, or `UnsupportedError` for a file, if it is not a checkpoint of any known format.
    """
    try:
        return formats.detect(store, place)  # Before `stat`: a path may be the common prefix of several files.
    except UnsupportedError as error:
        there = store.stat(place)
        if there is None:
            raise not_found(store, place) from None
        if there.is_folder:
            if found := new_run.runs_below(store, place, levels=2):
                raise NotFoundError(
                    f"{place}: expected a checkpoint or a run, found a directory of runs; pass the one that is meant: "
                    f"{found}"
                ) from None
            raise NotFoundError(str(error)) from None
        above = new_run.parent(place)
        if above and summary.stat_manifest(store, above):
            raise UnsupportedError(f"{place}: it belongs to the checkpoint {above}; open that") from None
        raise


def use_valid(
    run: str,
    find: Callable[[], Iterable[StepCopy] | OneCheckpoint],
    use: Callable[[Checkpoint], T],
    *,
    fallback: bool = True,
    on_damaged: Callable[[StepCopy], None] = lambda place: None,
    on_all_processes: Callable[[Callable[[], T]], T] = lambda attempt: attempt(),
) -> tuple[int, T]:
    """Returns the first step that opens, and the result of `use`. Logs damaged copies and calls `on_damaged` with each.

    find: returns the candidates, newest first. It is called again if they were replaced or deleted meanwhile. If it
        returns a checkpoint that is not a step, the number is -1.
    on_all_processes: makes an attempt that succeeds only if it succeeds in all processes.

    Raises the first `CorruptError` if no step can be used. Without `fallback` it tries only the copies of the first
    step. A step that is deleted meanwhile is skipped.
    """

    def attempt() -> tuple[int, T]:
        places = find()
        if isinstance(places, OneCheckpoint):
            return -1, on_all_processes(lambda: _use_with_retries(use, *places[:3], opened=places.opened))
        first: CorruptError | None = None
        deleted = 0
        rest = iter(places)
        place = next(rest, None)
        while place:
            try:
                return place.step, on_all_processes(functools.partial(_use_with_retries, use, *place[1:], place.step))
            except CorruptError as error:
                on_damaged(place)
                following = _following(place, rest, fallback)
                if not (following or fallback):
                    raise
                _log.error("step %d is damaged: %s", place.step, error)
                first = first or error.with_traceback(None)  # Its frames would keep partly restored arrays alive.
            except ReplacedError:
                is_there = summary.stat_manifest(place.store, place.path) or formats.is_foreign(place.store, place.path)
                if is_there or not ((following := _following(place, rest, fallback)) or fallback):
                    raise
                _log.warning("%s: step %d was deleted meanwhile", place.path, place.step)
                deleted += 1
            if following:
                _log_fallback(place, following)
            place = following
        if deleted and not first:
            raise ReplacedError(f"{run}: expected a step, found none; all that were there have been deleted meanwhile")
        raise first or NotFoundError(f"{run}: expected a step, found none{new_run.suggest_run(stores.get(run), run)}")

    return retry_if_replaced(attempt)


def _following(place: StepCopy, rest: Iterator[StepCopy], fallback: bool) -> StepCopy | None:
    """Returns the next copy to try; without `fallback` only another copy of the same step."""
    found = next(rest, None)
    return found if fallback or (found and found.step == place.step) else None


def _log_fallback(passed: StepCopy, place: StepCopy) -> None:
    if place.step == passed.step:
        _log.warning("taking the copy of step %d at %s", place.step, place.path)
    else:
        _log.warning("taking step %d, the one before step %d", place.step, passed.step)


def _use_with_retries(
    use: Callable[[Checkpoint], T],
    store: Store,
    path: str,
    format: str | None,
    step: int | None = None,
    opened: Checkpoint | None = None,
) -> T:
    """Opens a checkpoint, or a given step, and returns the result of `use`. Starts again if it is overwritten.

    The first attempt uses `opened`, if that is given. Raises `ReplacedError` if the checkpoint was deleted, or is
    overwritten faster than it can be read.
    """
    known = [] if opened is None else [opened]
    return retry_if_replaced(lambda: use(known.pop() if known else open_step(store, path, step, format)))


def open_step(store: Store, path: str, step: int | None, format: str | None) -> Checkpoint:
    """Opens a step of a run. The checkpoint gets the number in its name, not the number that it was saved with."""
    ckpt = open_in_store(store, path, format)
    if step is None or ckpt.step == step:
        return ckpt
    if ckpt.step is not None:
        _log.warning("%s is step %d, as its name says, but was saved as step %d", path, step, ckpt.step)
    return ckpt._numbered(step)


def retry_if_replaced(attempt: Callable[[], T]) -> T:
    """Returns the result of an attempt. Repeats it if the steps that it listed were replaced or deleted meanwhile."""
    for _ in range(READ_ATTEMPTS - 1):
        with contextlib.suppress(ReplacedError):
            return attempt()
    return attempt()
