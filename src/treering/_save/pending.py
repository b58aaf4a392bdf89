"""A save under way, and its outcome: a failure is raised to a caller, or printed when the interpreter ends."""

import atexit
import contextlib
import dataclasses
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator

from .._core import html
from .._core.readable import nbytes
from .._core.source import Written
from .._processes import coordinator
from .._processes.calls import Call
from .._pytree import devices
from .._pytree.on_demand import Supply
from .._pytree.staging import Staging
from .._threads.alive import Alive
from .._threads.latch import Latch
from .._threads.pool import ThreadPool
from ..errors import RequestError, SaveError, TreeringError

_log = logging.getLogger("treering")
_LONG_STALL = 1.0  # seconds

last: Latch | None = None  # the end of the last save: saves are written in the order of the calls
unseen: "list[PendingSave]" = []  # failed saves whose error no caller has been given
_alive: "Alive[PendingSave]" = Alive()


@dataclasses.dataclass(frozen=True, repr=False)
class SaveReport:
    """The size and the times of a save.

    `nbytes` is the size on disk; `stall_seconds` is how long the call held up its caller, `wait_seconds` the part
    of that for which it waited until the save before was over, and `seconds` the time from the call to the commit.
    Of these, this process was writing for `write_seconds`, was waiting for the disk to make its file durable for
    `sync_seconds`, and for the commit, other processes included, for `commit_seconds`; formats other than the
    native one count all of that as writing.
    """

    path: str
    step: int | None
    nbytes: int
    stall_seconds: float
    seconds: float
    write_seconds: float = 0.0
    sync_seconds: float = 0.0
    commit_seconds: float = 0.0
    wait_seconds: float = 0.0

    @property
    def gb_per_second(self) -> float:
        """10^9 bytes a second, from the call to the commit, without `wait_seconds`."""
        own = self.seconds - self.wait_seconds
        return self.nbytes / 1e9 / own if own else 0.0

    def _repr_html_(self) -> str:
        rows = [("size", nbytes(self.nbytes)), ("rate", f"{self.gb_per_second:.2f} GB/s")]
        rows += [("step", str(self.step))] if self.step is not None else []
        seconds = ("seconds", "stall_seconds", "wait_seconds", "write_seconds", "sync_seconds", "commit_seconds")
        rows += [(name.replace("_", " "), f"{getattr(self, name):.3f}") for name in seconds]
        return html.page(self.path, html.table(rows))

    def __repr__(self) -> str:
        return f"<SaveReport {self}>"

    def __str__(self) -> str:
        before = f", {self.wait_seconds * 1e3:.1f} ms of it for the save before" if self.wait_seconds >= 1e-4 else ""
        return (
            f"{self.path}: {self.nbytes / 1e6:.1f} MB in {self.seconds:.2f} s ({self.gb_per_second:.2f} GB/s); the "
            f"caller waited for {self.stall_seconds * 1e3:.1f} ms{before}"
        )


class PendingSave:
    """A save that goes on in the background. Made by `save_async`.

    `managed`: a `Checkpointer` raises its failure. `blocking`: the caller waits until the save is over. The caller made
    its call at `begun`, and has waited for the save before for `waited` seconds since.
    """

    def __init__(
        self,
        path: str,
        step: int | None,
        staging: Supply,
        call: Call,
        *,
        managed: bool,
        blocking: bool = False,
        begun: float | None = None,
        waited: float = 0.0,
    ):
        self.path = path
        self.step = step
        self._staging = staging
        self._call = call
        self._managed = managed
        self._blocking = blocking
        self._begun = time.perf_counter() if begun is None else begun
        self._stall, self._waited = 0.0, waited
        self._returned = Latch()  # the caller has its thread back
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._finished = Latch()
        self._reported = False  # a caller has been, or is being, given the failure
        _alive.add(self)

    @classmethod
    def _of_failure(cls, path: str, step: int | None, call: Call, error: BaseException) -> "PendingSave":
        """A save that failed in this process before it was under way; in other processes it may be under way."""
        pending = cls(path, step, Staging([], [], None), call, managed=True)
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

    @property
    def reported(self) -> bool:
        """Whether a caller has been given the failure, by `result` or by the call that made the save."""
        return self._reported

    def seen(self) -> BaseException:
        """The failure of a save, which from now on counts as reported."""
        self._seen()
        assert self._error is not None
        return self._error

    def tell_log(self) -> None:
        """Logs the failure, for process 0 raises none: its caller has been given one already, or it has not failed."""
        self._seen()
        _log.error("%s: in this process the save failed: %s", self.path, self._error)

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
        assert self._report
        return self._report

    def _wait(self) -> None:
        """Returns when the save is over, well or not."""
        self._finished.wait()

    def _fail(self, reason: BaseException) -> None:
        """Aborts the save, unless it is over; the caller raises `reason` itself."""
        self._reported = True
        self._returned.set()
        self._staging.fail(reason)

    def _cancel(self, reason: BaseException) -> None:
        """Aborts the save, and returns when it is over and what was written is removed; the caller raises `reason`."""
        self._fail(reason)
        self._call.cancel(reason)
        self._finished.wait()
        self._seen()

    def _run(self, write: Callable[[ThreadPool], None], previous: Latch | None, pool: ThreadPool) -> None:
        """Runs the save in the thread that saves."""
        try:
            with pool, devices.explicit():
                self._staging.writers_needed.wait()
                self._await(previous)
                self._staging.check()
                write(pool)
        except BaseException as error:
            self._staging.fail(error)  # or the caller would wait for room that no writer makes
            if self._reported:  # the caller raises this error, and its frames may be running in the caller's thread
                self._error = error
            else:
                self._error = _as_save_error(error, self.path)
                unseen.append(self)
        finally:
            self._staging.clear()
            self._call.close(self._error)
            self._finished.set()

    def _await(self, previous: Latch | None) -> None:
        """Returns when the save before is over, or this one has failed."""
        if previous is None or previous.is_set():
            return
        since = time.perf_counter()
        while not self._staging.failed and not previous.wait(0.1):
            pass
        if self._blocking or not self._returned.is_set():  # the caller waits as well, at least for room
            self._waited += time.perf_counter() - since

    def _returns(self) -> None:
        """Notes that the caller goes on."""
        self._stall = time.perf_counter() - self._begun
        self._returned.set()

    def _warn_of_stall(self) -> None:
        """Logs that a loop was held up for long, and what helps."""
        if self._stall < _LONG_STALL:
            return
        if self._waited > self._stall / 2:
            why, help = f", {self._waited:.1f} s of it for the save before", ', and so does when_busy="skip"'
        else:
            why, help = ", while the state was copied", ""
        stood = f"step {self.step}: the loop stood still for {self._stall:.1f} s"
        _log.warning("%s: %s%s; a larger save_every helps%s", self.path, stood, why, help)

    def _committed(self, written: Written) -> SaveReport:
        seconds = time.perf_counter() - self._begun
        self._returned.wait()  # the caller has handed everything over, and is about to return
        nbytes, *parts = written
        stall = seconds if self._blocking else self._stall
        waited = min(self._waited, stall)
        self._report = SaveReport(self.path, self.step, nbytes, stall, max(seconds, stall), *parts, wait_seconds=waited)
        return self._report

    def _seen(self) -> None:
        self._reported = True
        with contextlib.suppress(ValueError):
            unseen.remove(self)

    def __repr__(self) -> str:
        return f"<PendingSave {self.path}: {'failed' if self._error else 'done' if self.done() else 'under way'}>"


def _as_save_error(error: BaseException, path: str) -> BaseException:
    """The error as callers get it, without the arrays that its traceback would keep alive."""
    if not isinstance(error, TreeringError) or isinstance(error, RequestError):
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


@contextlib.contextmanager
def as_save_error(path: str) -> Iterator[None]:
    """Raises any error of the block in the form that callers of a save get."""
    try:
        yield
    except Exception as error:
        wrapped = _as_save_error(error, path)
        raise wrapped from wrapped.__cause__


def alive() -> "list[PendingSave]":
    """The saves of this process that are still referenced."""
    return _alive.all()


def wait_for_all_in(directory: str) -> None:
    """Returns when no save of this process into a directory is under way, whichever call made it."""
    for pending in alive():
        if os.path.dirname(pending.path) == directory:
            pending._wait()


@atexit.register
def _report_unseen() -> None:
    for pending in unseen:
        print(f"treering: a save in the background failed: {pending.path}", file=sys.stderr)
        traceback.print_exception(pending._error)


def _forget_after_fork() -> None:
    """Ends the saves of the parent in a forked child, which has none of the threads that write them."""
    global last
    last = None
    coordinator.forget_after_fork()
    unseen.clear()
    for pending in _alive.all():
        if not pending.done():
            pending._error = SaveError(f"{pending.path}: this save belongs to the process that was forked")
            pending._finished = Latch()  # the old one's lock may be held for ever
            pending._finished.set()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
