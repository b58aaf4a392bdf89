"""Follows a run that another job writes, such as for an evaluator."""

import contextlib
import itertools
import logging
import os
import posixpath
import time
from collections.abc import Iterator, Mapping

from .. import stores
from .._core.entries import step_number
from .._core.leaf_paths import join_names
from .._core.tracebacks import hide_internal_frames
from .._restore.checkpoint import Checkpoint
from ..errors import CorruptError, MismatchError, NotFoundError
from ..formats import StepPath
from ..formats.treering import summary
from ..formats.treering.read import Reader
from ..stores.read_errors import UnreadableError, reading
from ..stores.store import Store
from . import new_run
from . import run_layout as _run
from .step_fallback import open_step

_log = logging.getLogger("treering")
_POLL_SECONDS = 0.5  # seconds between listings of the run
# On a file system, a poll looks again at the newest steps and as many others, in turn. A long run has too many for all.
_LOOKED_AT_AGAIN = 8


@hide_internal_frames
def follow(
    run: str | os.PathLike[str], *, after: int | None = None, timeout: float | None = None, newest: bool = False
) -> Iterator[Checkpoint]:
    """Yields each step of a run once, ascending: the present steps, then new steps as they are committed.

    >>> for ckpt in tr.follow("runs/gpt", timeout=3600):
    ...     tr.record("runs/gpt", ckpt.step, {"val/loss": evaluate(ckpt.restore(like))})

    after: only later steps.
    timeout: ends after this many seconds without a new step; None waits forever. The time that the caller takes for
        a step is not included.
    newest: yields only the newest step each time, for a caller that is slower than the job that saves. Steps in between
        are logged and left out; the last step of a finished run never is.

    Ends when the run is marked as finished (`Checkpointer.finish`) and no step is left to yield. Nothing is written,
    and the run need not exist yet. A step that is deleted before it is reached is left out. A step that is deleted
    afterwards can still be read on file systems that keep open files. Damaged steps are logged and left out; with
    `newest`, the step before is next. A step that is saved again after a `rewind` is a new step. In a run of
    thousands of steps, an old one that was replaced between two polls may be noticed minutes later. Raises
    `UnsupportedError` for a step of a later release.
    """
    place, first = stores.absolute_run(run), -1 if after is None else step_number(after)
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout < 0):
        raise MismatchError(f"timeout={timeout!r}: expected a number of seconds from 0, or None")
    if not isinstance(newest, bool):
        raise MismatchError(f"newest={newest!r}: expected True or False")
    return _follow(place, first, timeout, newest)


def _follow(run: str, after: int, timeout: float | None, newest: bool) -> Iterator[Checkpoint]:
    store = stores.get(run)
    seen: dict[int, object] = {}  # the versions of steps that were reached
    # The steps that the last poll knew: Treering's, and those of other libraries.
    own: dict[int, StepPath] = {}
    others: dict[int, StepPath] = {}
    yielded: dict[int, object] = {}
    waiting_since = time.monotonic()
    begin = "" if timeout == 0 else "waits for the first step"
    with reading(run):
        names = store.list(run)  # In a bucket, an object may have the name of the run, too.
        is_file = not names and bool((there := store.stat(run)) and there.is_file)
        if not (is_file or names):
            said = ("there is nothing yet", begin, new_run.suggest_path(store, run).removeprefix("; "))
            _log.warning("%s: %s", run, "; ".join(filter(None, said)))
        elif is_file or not _run.located_steps(store, run):
            meant = ("; it is a file" if is_file else "") + new_run.suggest_run(store, run)
            # A run that has just begun has nothing that the caller might mean instead.
            _log.log(logging.WARNING if meant else logging.INFO, "%s: %s%s", run, begin or "there is no step", meant)
    for poll in itertools.count():
        with reading(run):
            # Before the listing, which is then complete.
            finished = store.stat(posixpath.join(run, _run.FINISHED_MARK))
        with store.glance(run):
            again = _looked_at_again(sorted({*own, *others}), poll)
            passed = {step for step in own if step not in again} if store.has_folders else set[int]()
            committed = {posixpath.basename(own[step].path) for step in passed}
            foreign = {step: one for step, one in others.items() if step not in again}
            found = _run.located_steps(store, run, committed=committed, foreign=foreign)
            if newest:
                new = _newest_unseen(store, found, after, seen, yielded)
            else:
                looked_at = [step for step in found if step > after and step not in passed and step not in foreign]
                versions = [(step, _checkpoint_version(store, found[step].path)) for step in looked_at]
                new = [(step, version) for step, version in versions if not _has(seen, step, version)]
            own, others = found.looked_at
        for step, version in new:
            seen[step] = version
            if ckpt := _open_or_skip(store, step, *found[step]):
                if newest:
                    _log_left_out(step, found, max([after, *(one for one in yielded if one < step)]))
                yielded[step] = version
                yield ckpt
                waiting_since = time.monotonic()
        if new:
            continue
        if finished or (timeout is not None and time.monotonic() - waiting_since >= timeout):
            return
        else:
            time.sleep(_POLL_SECONDS if timeout is None else min(_POLL_SECONDS, timeout))


def _looked_at_again(steps: list[int], poll: int) -> set[int]:
    """Returns the steps that a poll looks at again: they may have been replaced since the poll before."""
    older = steps[:-_LOOKED_AT_AGAIN]
    begin = poll * _LOOKED_AT_AGAIN % max(len(older), 1)
    return {*steps[-_LOOKED_AT_AGAIN:], *older[begin : begin + _LOOKED_AT_AGAIN]}


def _newest_unseen(
    store: Store,
    found: _run.Steps[StepPath],
    after: int,
    seen: Mapping[int, object],
    yielded: Mapping[int, object],
) -> list[tuple[int, object]]:
    """Returns the newest step that was not reached yet, and its version; nothing if a step after it was yielded.

    If that step turns out to be damaged or deleted, the run is listed again, because a newer one may be there by then.
    """
    for step in reversed(found):
        if step <= after:
            return []
        version = _checkpoint_version(store, found[step].path)
        if _has(yielded, step, version):
            return []
        if not _has(seen, step, version):
            return [(step, version)]
    return []


def _has(versions: Mapping[int, object], step: int, version: object) -> bool:
    return step in versions and versions[step] == version


def _log_left_out(step: int, found: _run.Steps[StepPath], last: int) -> None:
    """Logs the steps between one and `last`, the one that was yielded before."""
    if left_out := [one for one in found.after(last) if one < step]:
        _log.info("step %d is the newest; left out: %s", step, join_names(tuple(map(str, left_out))))


def _checkpoint_version(store: Store, path: str) -> object:
    """Returns a value that differs for the next checkpoint at the same path; None for other libraries' checkpoints."""
    with contextlib.suppress(UnreadableError), reading(path):
        found = summary.stat_manifest(store, path)
        return found and found.version
    return None


def _open_or_skip(store: Store, step: int, path: str, format: str | None) -> Checkpoint | None:
    try:
        ckpt = open_step(store, path, step, format)
        if isinstance(ckpt._source, Reader):
            ckpt._source.open_files()
    except NotFoundError:
        _log.info("step %d was deleted before it was reached", step)
        return None
    except CorruptError as error:
        _log.warning("step %d is left out: %s", step, error)
        return None
    return ckpt
