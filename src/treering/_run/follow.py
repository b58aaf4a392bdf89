"""An evaluator's view of a run that grows."""

import contextlib
import logging
import os
import posixpath
import time
from collections.abc import Iterator

from .. import stores
from .._core.entries import step_number
from .._restore.checkpoint import Checkpoint
from ..errors import CorruptError, MismatchError, NotFoundError
from ..formats.treering import summary
from ..formats.treering.read import Reader
from ..stores.read_errors import UnreadableError, reading
from ..stores.store import Store
from . import new_run
from . import run as _run
from .latest_good import open_step

_log = logging.getLogger("treering")
_POLL_SECONDS = 0.5  # seconds between looks at the run


def follow(
    run: str | os.PathLike[str], *, after: int | None = None, timeout: float | None = None
) -> Iterator[Checkpoint]:
    """Yields the steps of a run, ascending, those that are there and those that are still to come, each once.

    >>> for ckpt in tr.follow("runs/gpt", timeout=3600):
    ...     tr.record("runs/gpt", ckpt.step, {"val/loss": evaluate(ckpt.restore(like))})

    after: only later steps.
    timeout: ends after so many seconds without a new step; None waits for ever. The time that the caller takes
        does not count.

    Ends when the run is marked as finished (`Checkpointer.finish`) and nothing is left to yield. Nothing is written,
    and the run need not exist yet. A step that is deleted before it is reached is left out; one that is deleted
    afterwards can still be read, on file systems that keep open files. Damaged ones are logged and left out. A step
    that is saved again, after a `rewind`, is a new one. Raises `UnsupportedError` for a step of a later release.
    """
    place, first = stores.absolute_run(run), -1 if after is None else step_number(after)
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout < 0):
        raise MismatchError(f"timeout={timeout!r}: expected a number of seconds from 0, or None")
    return _follow(place, first, timeout)


def _follow(run: str, after: int, timeout: float | None) -> Iterator[Checkpoint]:
    store = stores.of(run)
    seen: dict[int, object] = {}
    waiting_since = time.monotonic()
    with reading(run):
        if store.list(run) and not _run.located_steps(store, run) and (meant := new_run.meant(store, run)):
            _log.warning("%s: waits for the first step%s", run, meant)
    while True:
        with reading(run):
            finished = store.stat(posixpath.join(run, _run.FINISHED))  # asked first: then the listing below is complete
        found = [
            (step, one, _mark(store, one.path)) for step, one in _run.located_steps(store, run).items() if step > after
        ]
        new = [one for one in found if one[0] not in seen or seen[one[0]] != one[2]]
        for step, one, mark in new:
            seen[step] = mark
            if ckpt := _open(store, step, *one):
                yield ckpt
                waiting_since = time.monotonic()
        if new:
            continue
        if finished or (timeout is not None and time.monotonic() - waiting_since >= timeout):
            return
        else:
            time.sleep(_POLL_SECONDS if timeout is None else min(_POLL_SECONDS, timeout))


def _mark(store: Store, path: str) -> object:
    """A mark that differs for the next checkpoint at the same path; None for those of other libraries."""
    with contextlib.suppress(UnreadableError), reading(path):
        found = summary.look(store, path)
        return found and found.version
    return None


def _open(store: Store, step: int, path: str, format: str | None) -> Checkpoint | None:
    try:
        ckpt = open_step(store, path, step, format)
        if isinstance(ckpt._source, Reader):
            ckpt._source.hold()
    except NotFoundError:
        _log.info("step %d was deleted before it was reached", step)
        return None
    except CorruptError as error:
        _log.warning("step %d is left out: %s", step, error)
        return None
    return ckpt
