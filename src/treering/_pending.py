"""A save under way: its outcome, and that nobody stays untold of a failure."""

import atexit
import contextlib
import dataclasses
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable

from . import _processes
from ._crew import Crew
from ._processes import Call
from ._snapshot import Feed
from .errors import SaveError, TreeringError

last: threading.Event | None = None  # the end of the last save: saves are written in the order of the calls
unseen: "list[PendingSave]" = []  # failed, and nobody has been told
_alive: "weakref.WeakSet[PendingSave]" = weakref.WeakSet()


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

    def __init__(self, path: str, step: int | None, feed: Feed, call: Call, *, managed: bool):
        self.path = path
        self.step = step
        self._feed = feed
        self._call = call
        self._managed = managed  # by a Checkpointer, which raises what this fails with
        self._begun = time.perf_counter()
        self._stall = 0.0  # set by the caller's thread
        self._seconds = 0.0
        self._nbytes = 0
        self._error: BaseException | None = None
        self._finished = threading.Event()
        _alive.add(self)

    @classmethod
    def _of_failure(cls, path: str, step: int | None, call: Call, error: BaseException) -> "PendingSave":
        """A save that failed before it was under way, here; in other processes it may be under way."""
        pending = cls(path, step, Feed([], None), call, managed=True)
        pending._error = error
        pending._finished.set()
        return pending

    def done(self) -> bool:
        """Whether the save is over, well or not."""
        return self._finished.is_set()

    @property
    def failed(self) -> bool:
        """Whether the save is over and failed; `result` raises how."""
        return self.done() and self._error is not None

    def result(self, timeout: float | None = None) -> SaveReport:
        """Waits for the commit, at most `timeout` seconds.

        Raises `SaveError` (or `ExistsError`) when the save failed, `TimeoutError` when it is not over yet;
        it then goes on.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self.path}: the save is not over after {timeout} seconds; it goes on")
        if self._error:
            self._seen()
            raise self._error
        return SaveReport(self.path, self.step, self._nbytes, self._stall, self._seconds)

    def _wait(self) -> None:
        """Returns when the save is over, well or not."""
        self._finished.wait()

    def _cancel(self, reason: BaseException) -> None:
        """Stops writing and removes what was written, unless the save is over already. Returns when it is."""
        self._feed.fail(reason)
        self._call.cancel(reason)
        self._finished.wait()
        self._seen()

    def _run(self, write: Callable[[Crew], None], previous: threading.Event | None, crew: Crew) -> None:
        """What the thread of the save does; `write` returns the size."""
        try:
            with crew:
                self._feed.writers_needed.wait()
                while previous and not self._feed.failed and not previous.wait(0.1):
                    pass
                self._feed.check()
                write(crew)
        except BaseException as error:
            self._feed.fail(error)  # or the caller would wait for room that nobody makes
            self._error = _as_save_error(error, self.path)
            unseen.append(self)
        finally:
            self._feed.clear()
            self._call.close(self._error)
            self._finished.set()

    def _committed(self, nbytes: int) -> None:
        self._nbytes, self._seconds = nbytes, time.perf_counter() - self._begun

    def _seen(self) -> None:
        with contextlib.suppress(ValueError):
            unseen.remove(self)

    def __repr__(self) -> str:
        return f"<PendingSave {self.path}: {'failed' if self._error else 'done' if self.done() else 'under way'}>"


def _as_save_error(error: BaseException, path: str) -> BaseException:
    """The error as callers get it, without the arrays that its traceback would keep alive."""
    if not isinstance(error, TreeringError):
        wrapped = SaveError(
            f"{path}: saving failed: {str(error) or type(error).__name__}; what was there before is untouched"
        )
        wrapped.__cause__ = error
        error = wrapped
    part: BaseException | None = error
    while part is not None:
        traceback.clear_frames(part.__traceback__)
        part = part.__cause__
    return error


def alive() -> "list[PendingSave]":
    """Those that somebody still holds."""
    return list(_alive)


@atexit.register
def _report_unseen() -> None:
    for pending in unseen:
        print(f"treering: a save in the background failed: {pending.path}", file=sys.stderr)
        traceback.print_exception(pending._error)


def _forget_after_fork() -> None:
    """A forked child has none of the threads, so nobody must wait for their saves there."""
    global last
    last = None
    _processes.forget_after_fork()
    unseen.clear()
    for pending in list(_alive):
        if not pending.done():
            pending._error = SaveError(f"{pending.path}: this save belongs to the process that was forked")
            pending._finished = threading.Event()  # the old one's lock may be held for ever
            pending._finished.set()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
