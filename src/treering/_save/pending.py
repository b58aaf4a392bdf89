"""Holds a save in progress and its outcome: a caller gets its error, or else Treering prints it at exit."""

import atexit
import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from .. import stores
from .._core import printing
from .._core.calls import Call
from .._core.source import Written
from .._core.units import nbytes
from .._processes import coordinator
from .._pytree import devices
from .._pytree.lazy_supply import ShardSupply
from .._pytree.staged_supply import StagedSupply
from .._threads.forks import WeakRegistry
from .._threads.pool import ThreadPool
from .._threads.thread import Latch, Thread, lost_thread
from ..errors import RequestError, SaveError, TreeringError, UnsupportedError
from ..stores.read_errors import is_full

_log = logging.getLogger("treering")
_LONG_STALL_SECONDS = 1.0  # A call that blocks the training loop for this long or longer is logged.

# Set when the save that began last and all before it are over. The next save waits for it, because saves are written in
# the order of the calls.
saves_finished: Latch | None = None
unreported: "list[PendingSave]" = []  # failed saves whose error no caller has got yet
_live_saves: "WeakRegistry[PendingSave]" = WeakRegistry()


@dataclasses.dataclass(frozen=True, repr=False)
class SaveReport:
    """The size and the times of a save.

    path: the absolute path of the checkpoint.
    step: the step number, or None.
    nbytes: the size on disk, in bytes.
    stall_seconds: the time for which the call blocked its caller.
    seconds: the time from the call to the commit.
    write_seconds: the part of `seconds` in which this process wrote.
    sync_seconds: the part of `seconds` in which this process waited until the disk had made its file durable.
    commit_seconds: the part of `seconds` in which this process waited for the commit, peers included.
    wait_seconds: the part of `stall_seconds` in which the call waited for the previous save.
    lease_seconds: the part of `stall_seconds` in which the call waited for the lease of the run.
    shared_bytes: the part of `nbytes` that this process did not write or upload again: files that it shares with
        earlier steps, and objects that the server of a bucket has copied.
    changed: of a version that a `Publisher` stores as differences, the share of the elements that changed; else None.

    Formats other than the native one count writing, sync and commit as writing.
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
    lease_seconds: float = 0.0
    shared_bytes: int = 0
    changed: float | None = None

    @property
    def gb_per_second(self) -> float:
        """The rate in 10^9 bytes per second, from the call to the commit, without both waits."""
        own = self.seconds - self.wait_seconds - self.lease_seconds
        return self.nbytes / 1e9 / own if own else 0.0

    @property
    def _rate(self) -> str:
        return f"{nbytes(self.gb_per_second * 1e9)}/s"

    def _repr_html_(self) -> str:
        rows = [("size", nbytes(self.nbytes)), ("rate", self._rate)]
        rows += [("shared", nbytes(self.shared_bytes))] if self.shared_bytes else []
        rows += [("step", str(self.step))] if self.step is not None else []
        seconds = ("seconds", "stall_seconds", "wait_seconds", "lease_seconds")
        seconds += ("write_seconds", "sync_seconds", "commit_seconds")
        rows += [(name.replace("_", " "), f"{getattr(self, name):.3f}") for name in seconds]
        return printing.page(self.path, printing.table(rows))

    def __repr__(self) -> str:
        return f"<SaveReport {self}>"

    def __str__(self) -> str:
        shared = f", {nbytes(self.shared_bytes)} of it shared with earlier steps" if self.shared_bytes else ""
        waits = ((self.wait_seconds, "the previous save", 1e-4), (self.lease_seconds, "the lease of the run", 0.1))
        before = "".join(f", {took * 1e3:.1f} ms for {what}" for took, what, least in waits if took >= least)
        return (
            f"{self.path}: {nbytes(self.nbytes)} in {self.seconds:.2f} s ({self._rate}){shared}; "
            f"the caller waited for {self.stall_seconds * 1e3:.1f} ms{before}"
        )


class PendingSave:
    """A save that continues in the background. `save_async` returns one.

    managed: True if a `Checkpointer` raises the error of the save.
    blocking: True if the caller waits until the save is over.
    begun: the time of the call, by `time.perf_counter`.
    waited: seconds for which the caller has waited for the previous save since then.
    lease_seconds: seconds for which the caller has waited for the lease of the run since then.
    """

    def __init__(
        self,
        path: str,
        step: int | None,
        staging: ShardSupply,
        call: Call,
        *,
        managed: bool,
        blocking: bool = False,
        begun: float | None = None,
        waited: float = 0.0,
        lease_seconds: float = 0.0,
    ):
        self.path = path
        self.step = step
        self._supply = staging
        self._call = call
        self._managed = managed
        self._blocking = blocking
        self._start_time = time.perf_counter() if begun is None else begun
        self._stall_seconds, self._wait_seconds, self._lease_seconds = 0.0, waited, lease_seconds
        self._caller_released = Latch()  # set when the caller's thread is free again
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._finished = Latch()
        self._all_finished = Latch()  # set when this save and all before it are over
        self._reported = False  # True if a caller has the error, or is about to get it
        self._pool: ThreadPool | None = None  # for a save whose thread ends without a result
        self._losing = threading.Lock()  # acquired by the thread that ends such a save
        _live_saves.add(self)

    @classmethod
    def _already_failed(cls, path: str, step: int | None, call: Call, error: BaseException) -> "PendingSave":
        """Returns a save that failed in this process before it began.

        Its peers may have begun theirs, and the list of saves must be the same in all processes.
        """
        pending = cls(path, step, StagedSupply([], [], None), call, managed=True)
        pending._error = error
        pending._finished.set()
        return pending

    def done(self) -> bool:
        """Returns True if the save is over, successful or not."""
        over = self._finished.is_set()
        if over and self._report is None and self._error is None:
            self._end_without_result()
        return over

    @property
    def failed(self) -> bool:
        """True if the save is over and has failed. `result` then raises the error."""
        return self.done() and self._error is not None

    @property
    def reported(self) -> bool:
        """True if a caller has got the error, from `result` or from the call that began the save."""
        return self._reported

    def take_error(self) -> BaseException:
        """Returns the error of a failed save, and marks it as reported."""
        self._mark_reported()
        assert self._error is not None
        return self._error

    def log_error(self) -> None:
        """Logs the error of this process, and marks it as reported.

        Used if process 0 raises no error, because its save succeeded or its caller has got the error already. If this
        process then raised alone, its peers would wait for it in their next call.
        """
        self._mark_reported()
        _log.error("%s: in this process the save failed: %s", self.path, self._error)

    def result(self, timeout: float | None = None) -> SaveReport:
        """Waits for the commit, at most `timeout` seconds, and returns the report.

        Raises `SaveError` (or `ExistsError`) if the save failed. Raises `TimeoutError` if the save is not over yet; it
        then continues.
        """
        self._finished.wait(timeout)
        if not self.done():
            raise TimeoutError(f"{self.path}: the save is not over after {timeout} seconds; it continues")
        if self._error:
            self._mark_reported()
            raise self._error
        assert self._report
        return self._report

    def _wait(self, timeout: float | None = None) -> bool:
        """Waits until the save is over, at most `timeout` seconds. Returns True if it is over, successful or not."""
        self._finished.wait(timeout)
        return self.done()

    def _wait_if_exiting(self) -> None:
        """Waits until the save is over if a function of `atexit` has begun it.

        Python has waited for all threads before it calls these functions, so it would end this one.
        """
        main = threading.main_thread()
        if threading.get_ident() == main.ident and not main.is_alive():
            self._wait()

    def _watch(self, thread: Thread, previous: Latch | None, pool: ThreadPool) -> None:
        """Notes what is to be ended if the thread that saves ends without a result. Called before it is started."""
        self._pool = pool
        self._supply.watch(thread)
        self._finished.is_lost = lambda: thread.has_ended
        self._all_finished.is_lost = lambda: thread.has_ended and (previous is None or previous.is_set())

    def _end_without_result(self) -> None:
        """Ends a save whose thread has ended without a report or an error."""
        with self._losing:
            if self._error is not None:
                return
            error = lost_thread(f"{self.path}: saving failed")
            if not self._reported:
                unreported.append(self)
            self._supply.fail(error)
            if self._pool:
                self._pool.close()
            self._supply.clear()
            self._error = error
        self._call.close(error)

    def _fail(self, reason: BaseException) -> None:
        """Aborts the save unless it is over. The caller raises `reason`."""
        self._reported = True
        self._caller_released.set()
        self._supply.fail(reason)

    def _cancel(self, reason: BaseException) -> None:
        """Aborts the save, and waits until it is over and its files are removed. The caller raises `reason`."""
        self._fail(reason)
        self._call.cancel(reason)
        self._wait()
        self._mark_reported()

    def _run(self, write: Callable[[ThreadPool], None], previous: Latch | None, pool: ThreadPool) -> None:
        """Runs the save in the thread that saves."""
        try:
            with contextlib.closing(pool), devices.allow_transfers():
                self._supply.writers_needed.wait()
                if previous is not None and not previous.is_set():
                    self._wait_for_previous(previous)
                self._supply.check()
                write(pool)
        except BaseException as error:
            self._supply.fail(error)  # Otherwise the caller might wait for staging memory, which no writer frees now.
            if self._reported:
                # The caller raises this error. Its frames may still run in the caller's thread, so they stay as they
                # are; `_as_save_error` would clear them.
                self._error = error
            else:
                self._error = _as_save_error(error, self.path)
                unreported.append(self)
        finally:
            self._supply.clear()
            self._call.close(self._error)
            if previous is not None and not previous.is_set():  # This save was aborted while it waited.
                self._finished.set()  # Its caller does not wait for earlier saves, but the next save does.
                previous.wait()
            self._pool = None
            self._all_finished.set()
            self._finished.set()

    def _wait_for_previous(self, previous: Latch) -> None:
        """Waits until the previous save is over or this one has failed."""
        since = time.perf_counter()
        while not self._supply.failed and not previous.wait(0.1):
            pass
        # If the caller is still in its call, it has waited too: for the save, or for staging memory.
        if self._blocking or not self._caller_released.is_set():
            self._wait_seconds += time.perf_counter() - since

    def _release_caller(self) -> None:
        """Notes that the caller continues."""
        self._stall_seconds = time.perf_counter() - self._start_time
        self._caller_released.set()

    def _warn_of_stall(self) -> None:
        """Logs a warning if the call blocked the training loop for long. The warning says what helps."""
        if self._stall_seconds < _LONG_STALL_SECONDS:
            return
        if self._lease_seconds > self._stall_seconds / 2:
            why = f"{self._lease_seconds:.1f} s of it for the lease of the run; only a job's first save waits for it"
        elif self._wait_seconds > self._stall_seconds / 2:
            why = f"{self._wait_seconds:.1f} s of it for the previous save; "
            why += "saving less often (save_every) helps, and so does "
            why += 'when_busy="skip"'
        else:
            why = "while the state was copied; saving less often (save_every) helps"
        _log.warning("%s: step %s: the loop stood still for %.1f s, %s", self.path, self.step, self._stall_seconds, why)

    def _make_report(self, written: Written) -> SaveReport:
        seconds = time.perf_counter() - self._start_time
        # The caller has staged everything and returns soon. Then `_stall_seconds` is known.
        self._caller_released.wait()
        nbytes, write, sync, commit, shared, changed = written
        stall = seconds if self._blocking else self._stall_seconds
        waited = min(self._wait_seconds, stall)
        waits = waited, min(self._lease_seconds, stall - waited)
        self._report = SaveReport(
            self.path, self.step, nbytes, stall, max(seconds, stall), write, sync, commit, *waits, shared, changed
        )  # fmt: skip
        return self._report

    def _mark_reported(self) -> None:
        self._reported = True
        with contextlib.suppress(ValueError):
            unreported.remove(self)

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            f"{self.path}: a running save cannot be copied or sent to another process; pass its path, or what result() "
            "returns"
        )

    def __repr__(self) -> str:
        return f"<PendingSave {self.path}: {'failed' if self._error else 'done' if self.done() else 'under way'}>"


def _free_bytes_if_full(error: BaseException, path: str) -> int | None:
    """Returns the bytes that are free, if the disk was full and the file system says it."""
    if not (isinstance(error, OSError) and is_full(error)):
        return None
    ask = getattr(stores.get(path), "free_bytes", None)
    return ask(path) if ask else None


def _as_save_error(error: BaseException, path: str) -> BaseException:
    """Returns the error as callers get it, without the arrays that its traceback would keep alive.

    Errors of Treering stay what they are, except failed requests to a bucket. These and all others become `SaveError`.
    """
    if not isinstance(error, TreeringError) or isinstance(error, RequestError):
        full = f", with {free} bytes free now" if (free := _free_bytes_if_full(error, path)) is not None else ""
        what = str(error) or type(error).__name__
        wrapped = SaveError(f"{path}: saving failed: {what}{full}; an earlier checkpoint there is untouched")
        wrapped.__cause__ = error
        error = wrapped
    part: BaseException | None = error
    while part is not None:
        traceback.clear_frames(part.__traceback__)
        part = part.__cause__
    return error


@contextlib.contextmanager
def as_save_error(path: str) -> Iterator[None]:
    """Raises an error of the block in the form in which callers of a save get it."""
    try:
        yield
    except Exception as error:
        wrapped = _as_save_error(error, path)
        raise wrapped from wrapped.__cause__


def live_saves() -> "list[PendingSave]":
    """Returns the saves of this process that are still referenced."""
    return _live_saves.all()


def wait_for_all_saves() -> None:
    """Waits until no save of this process is in progress, whichever call began it."""
    for pending in live_saves():
        pending._wait()


def wait_for_saves_in(directory: str) -> None:
    """Waits until no save of this process into a directory is in progress, whichever call began it."""
    for pending in live_saves():
        if os.path.dirname(pending.path) == directory:
            pending._wait()


@atexit.register
def _print_unreported() -> None:
    for pending in unreported:
        print(f"treering: a save in the background failed: {pending.path}", file=sys.stderr)
        traceback.print_exception(pending._error)


def _forget_after_fork() -> None:
    """Ends the saves of the parent in a forked child, because the child has none of the threads that write them."""
    global saves_finished
    saves_finished = None
    coordinator.forget_after_fork()
    unreported.clear()
    for pending in _live_saves.all():
        if not pending.done():
            pending._error = SaveError(f"{pending.path}: this save runs in the parent process; wait for it there")
            pending._finished = Latch()  # A thread of the parent may have held the old one's lock at the fork.
            pending._finished.set()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
