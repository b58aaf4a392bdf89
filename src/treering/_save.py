"""Saving: snapshot, write, commit; in the background or not."""

import atexit
import dataclasses
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from . import _flax, _leaves, _tree, stores
from ._catalogue import encode_float
from ._collector import paused
from ._crew import Crew
from ._paths import absolute
from ._snapshot import Feed
from ._version import __version__
from .errors import MismatchError, SaveError, TreeringError, UnsupportedError
from .formats.treering import write as native
from .stores.local import check_free

_log = logging.getLogger("treering")
_WRITERS = 3  # threads of a save: while one waits for the disk, another copies and hashes
_last: "PendingSave | None" = None
_unseen: "list[PendingSave]" = []  # failed, and nobody has been told


@dataclasses.dataclass(frozen=True)
class SaveReport:
    """What a save did.

    `nbytes` is the size on disk; `stall_seconds` is how long the call held up its caller, and `seconds` the
    time from the call to the commit.
    """

    path: str
    step: int | None
    nbytes: int
    stall_seconds: float
    seconds: float


class PendingSave:
    """A save that goes on in the background. Made by `save_async`."""

    def __init__(self, path: str, step: int | None, feed: Feed):
        self.path = path
        self.step = step
        self._feed: Feed | None = feed
        self._stall = self._seconds = 0.0
        self._nbytes = 0
        self._error: BaseException | None = None
        self._finished = threading.Event()

    def done(self) -> bool:
        """Whether the save is over, well or not."""
        return self._finished.is_set()

    def result(self, timeout: float | None = None) -> SaveReport:
        """Waits for the commit, at most `timeout` seconds.

        Raises `SaveError` (or `ExistsError`) when the save failed, `TimeoutError` when it is not over yet;
        it then goes on.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self.path}: the save is not over after {timeout} seconds; it goes on")
        if self._error:
            if self in _unseen:
                _unseen.remove(self)
            raise self._error
        return SaveReport(self.path, self.step, self._nbytes, self._stall, self._seconds)

    def cancel(self, reason: BaseException) -> None:
        """Stops writing and removes what was written, unless the save is over already. Returns when it is."""
        if feed := self._feed:
            feed.fail(reason)
        self._finished.wait()
        if self in _unseen:
            _unseen.remove(self)

    def _finish(self, error: BaseException | None) -> None:
        self._feed = None
        if error is None:
            _log.info("saved %s: %.1f MB in %.2f s", self.path, self._nbytes / 1e6, self._seconds)
        else:
            if not isinstance(error, TreeringError):
                wrapped = SaveError(f"{self.path}: saving failed: {error}; what was there before is untouched")
                wrapped.__cause__ = error
                error = wrapped
            self._error = error
            _unseen.append(self)
        self._finished.set()

    def __repr__(self) -> str:
        return f"<PendingSave {self.path}: {'failed' if self._error else 'done' if self.done() else 'under way'}>"


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    overwrite: bool = False,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    metadata: Any = None,
    dtype: Any = None,
    memory_limit: int | None = 64 << 20,
) -> SaveReport:
    """Saves a pytree and returns when it is durable.

    >>> tr.save("checkpoints/a", {"params": params, "step": 7})

    path: a new directory; parents are made. `overwrite` replaces a checkpoint that is there, in one step.
    tree: any pytree of arrays, numbers, text, bytes, None, PRNG keys and functions (recorded by name alone).
    step, metrics, metadata: kept beside the tree; metrics are scalars by name, metadata anything JSON can say.
    dtype: what floating-point arrays are cast to.
    memory_limit: bytes of copies held at a time, where arrays must be copied (from a device, or because they
        are not laid out in C order); one larger array passes alone.

    Raises `UnsupportedError` for leaves that cannot be saved and `ExistsError` for a path in use, before
    anything is written; `SaveError` when writing fails, after everything it wrote is removed.
    """
    info = describe(step, metrics, metadata)
    pending = start(path, tree, info, overwrite=overwrite, dtype=dtype, limit=memory_limit, background=False)
    try:
        return pending.result()
    except BaseException as error:
        pending.cancel(error)  # an interrupt: take back what is half done before going on
        raise


def save_async(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    overwrite: bool = False,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    metadata: Any = None,
    dtype: Any = None,
    memory_limit: int | None = None,
) -> PendingSave:
    """Saves a pytree in the background.

    What is saved is what the arrays hold now: they may be changed, deleted or donated as soon as this
    returns. Saves are written in the order of the calls, and a program that ends still finishes them.

    Takes and raises what `save` does; a failure after this returned is raised by the result, or else by the
    next call of `save` or `save_async`, or else printed when the interpreter ends. With a `memory_limit` the
    call holds its caller up until all but that many bytes of copies are written.
    """
    info = describe(step, metrics, metadata)
    return start(path, tree, info, overwrite=overwrite, dtype=dtype, limit=memory_limit, background=True)


def start(
    path: str | os.PathLike[str],
    tree: Any,
    info: native.Info,
    *,
    overwrite: bool,
    dtype: Any,
    limit: int | None,
    background: bool,
    then: Callable[[], None] | None = None,
) -> PendingSave:
    """What both ways of saving do; `then` is called in the background after the commit."""
    global _last
    begun = time.perf_counter()
    if _unseen:
        _unseen.pop(0).result()
    place = absolute(path)
    with paused():
        walked = _tree.walk(_flax.split(tree)[0])
        content = _leaves.collect(walked.paths, walked.leaves, dtype=dtype, detach=background)
    skeleton = walked.skeleton
    check_free(stores.DISK, place, overwrite=overwrite)
    feed = Feed(content.pieces, limit)
    pending = PendingSave(place, info.step, feed)
    previous, crew = _last, Crew(_WRITERS)

    def work() -> None:
        error = None
        try:
            with crew:
                feed.writers_needed.wait()
                if previous:
                    previous._finished.wait()
                pending._nbytes = native.write(stores.DISK, place, skeleton, content, feed, info, crew, overwrite)
                if then:
                    then()
        except BaseException as caught:
            error = caught
        pending._seconds = time.perf_counter() - begun
        pending._finish(error)

    thread = threading.Thread(target=work, name="treering-save", daemon=False)
    try:
        thread.start()
    except BaseException:
        crew.close()
        raise
    _last = pending
    try:
        with paused():
            feed.run()
    except BaseException as error:
        pending.cancel(error)
        raise
    pending._stall = time.perf_counter() - begun
    return pending


def describe(step: int | None, metrics: Mapping[str, Any] | None, metadata: Any) -> native.Info:
    """Checks what is recorded beside the tree. Raises `MismatchError` and `UnsupportedError`."""
    if step is not None and (isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0):
        raise MismatchError(f"step: expected an integer from 0, found {step!r}")
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or np.shape(value) != ():
            raise MismatchError(f"metrics[{name!r}]: expected a name and a scalar, found shape {np.shape(value)}")
    if problem := _not_json(metadata, "metadata"):
        raise UnsupportedError(problem)
    software = {"treering": __version__, "jax": jax.__version__, "numpy": np.__version__}
    return native.Info(None if step is None else int(step), dict(metrics or {}), metadata, software)


def _not_json(value: Any, where: str) -> str | None:
    """What keeps a value from coming back from JSON as it is; None when nothing does."""
    if value is None or type(value) in (bool, int, str):
        return None
    if type(value) is float:
        finite = isinstance(encode_float(value), float)
        return None if finite else f"{where}: {value} is not JSON; write it as text or leave it out"
    if type(value) in (list, tuple):
        return next((p for i, item in enumerate(value) if (p := _not_json(item, f"{where}[{i}]"))), None)
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                return f"{where}: the key {key!r} is a {type(key).__name__}; JSON has only text as keys"
            if problem := _not_json(item, f"{where}[{key!r}]"):
                return problem
        return None
    return f"{where}: a {type(value).__qualname__} is not JSON; pass dicts, lists, text, numbers, bools and None"


@atexit.register
def _report_unseen() -> None:
    for pending in _unseen:
        print(f"treering: a save in the background failed: {pending.path}", file=sys.stderr)
        traceback.print_exception(pending._error)


def _forget_after_fork() -> None:
    """A forked child has none of the threads, so it must not wait for their saves."""
    global _last
    _last = None
    _unseen.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
