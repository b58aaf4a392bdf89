"""Uploads the steps of a run from the local to the remote tier, in the background."""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ..._threads.forks import free_in_children
from ..._threads.thread import Thread, start_threads
from ...errors import MismatchError, PeerError, SaveError, TreeringError
from ...stores.lease_registry import LeaseLostError
from ...stores.read_errors import is_momentary
from ..background_queue import BackgroundQueue
from ..plain_run import PlainRun
from ..retention import Retention
from .host_group import HostGroup


class _Timer(Thread, threading.Timer):
    """A timer whose end is noticed."""


class Uploadable(Protocol):
    """A run in two tiers, as its uploads see it."""

    root: str
    remote: PlainRun
    host_group: HostGroup | None

    @property
    def claimed(self) -> bool:
        """True if this process holds the leases of both tiers, and the local steps belong to the run."""
        ...

    def to_upload(self) -> list[int]:
        """Returns the steps to upload, the newest first."""
        ...

    def upload(self, step: int, on_progress: Callable[[int], None]) -> bool:
        """Uploads a step. Returns False if the remote tier has it already.

        on_progress: called with the number of bytes that are about to be sent.
        """
        ...

    def upload_metrics(self) -> None:
        """Uploads the metrics that steps got after their upload."""
        ...


_log = logging.getLogger("treering")
_POLL_SECONDS = 0.2
_MIN_RETRY_SECONDS = 10.0  # the wait after a failed attempt; each further failure doubles it
_MAX_RETRY_SECONDS = 600.0  # the longest wait


class _PausedError(Exception):
    """The upload was interrupted: this process is changing the run, or no longer holds its leases."""

    def __str__(self) -> str:
        return "the upload was interrupted"


class Uploader:
    """Uploads the missing steps one after the other, the newest first.

    `step` is the step that is being uploaded. A failure is logged, and the upload is tried again: after a while, with
    the next save and at the end.
    """

    def __init__(
        self,
        run: Uploadable,
        remote: Retention,
        bytes_per_second: float | None,
        notify: Callable[[BaseException], None],
        timeout: float,
    ):
        if bytes_per_second is not None and not (isinstance(bytes_per_second, int | float) and bytes_per_second > 0):
            raise MismatchError(
                f"upload_limit={bytes_per_second!r}: expected more than 0 bytes per second, or None for no limit"
            )
        self.step: int | None = None
        self._run, self._remote, self._notify, self._timeout = run, remote, notify, timeout
        self._queue = BackgroundQueue()
        self._pace = _Pace(bytes_per_second)
        # Held by the thread that uploads or otherwise changes the run.
        self._change_lock = free_in_children(threading.Lock())
        self._stopped = False
        self._error: BaseException | None = None  # the error of the last attempt
        self._notified_error: BaseException | None = None  # the error that the user's function was last called with
        self._wait = _MIN_RETRY_SECONDS  # seconds before the next attempt, if this one fails
        self._timer: _Timer | None = None

    @property
    def busy(self) -> bool:
        """True if an upload is running or queued."""
        return self._queue.busy

    @property
    def error(self) -> BaseException | None:
        """The error of the last attempt; None if it succeeded."""
        return self._error

    @property
    def lost_lease_error(self) -> BaseException | None:
        """The error of the last attempt if it found that another job writes the run; else None."""
        return self._error if isinstance(self._error, LeaseLostError) else None

    def begin(self) -> None:
        """Begins to upload the missing steps, unless each host has its own disk: then all processes must begin it."""
        if self._run.claimed and not self._run.host_group:
            self._queue.add("uploading steps", self._upload_all)

    def begin_together(
        self,
        group: HostGroup,
        after: str,
        process: int,
        *,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins an upload in which all hosts take part. Every process makes this call.

        then: called in process 0 when the steps are uploaded. At the end of the round the other hosts also delete the
            steps that it deletes.
        """
        what, timeout = f"{self._run.root}: uploading steps after {after}", self._timeout
        if process == 0:
            joint_round = functools.partial(group.round, what, timeout)
            self._queue.add(what, lambda: self._upload_all(joint_round, then))
        else:
            self._queue.add(what, lambda: group.follow(what, timeout, self._throttle))

    def _stop(self) -> None:
        self._stopped = True
        if group := self._run.host_group:
            group.cancel(_PausedError())

    def wait(self) -> None:
        """Waits until the uploads and deletions that have begun are over."""
        self._queue.wait()
        self._remote.wait()

    def lift_limit(self) -> None:
        """Ends the limit of bytes a second."""
        self._pace.lift()

    def check(self) -> None:
        """Tries again after an error. Raises `LeaseLostError` if an upload found that another job writes the run.

        Called in the user's thread, where the user's function may be called with the error.
        """
        if error := self.lost_lease_error:
            raise error
        error = self._error
        if error and error is not self._notified_error and not isinstance(error, _PausedError):
            self._notified_error = error
            self._notify(error)
        if error and not self.busy:
            self.begin()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Uploads nothing within a `with` block. A running upload is cancelled, and begins again after the block."""
        self._stop()
        try:
            with self._change_lock:
                yield
        finally:  # Also after an interrupt.
            self._stopped = False
            self.begin()

    def finish(self) -> BaseException | None:
        """Waits until all steps are uploaded, without the limit, and old ones are deleted. Returns the last error."""
        self._pace.lift()
        if timer := self._timer:
            timer.cancel()
            self._timer = None
        self.begin()
        self.wait()
        return self._error

    def _upload_all(
        self,
        joint_round: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        try:
            with joint_round(), self._change_lock:
                # Once another job has acquired the run, never upload again: the job may have replaced remote steps.
                if not self.lost_lease_error:
                    self._upload_missing()
                    then()
        except _PausedError as error:  # The upload starts over once the change is done.
            self._error = error
        except BaseException as error:  # Any error: `finish` must not report success.
            self._report(error)

    def _upload_missing(self) -> None:
        self._error = None
        tried: set[int] = set()
        self._check()
        self._remote.collect_garbage()
        while todo := [step for step in self._missing() if step not in tried]:
            tried.add(todo[0])
            self._upload(todo[0])
        # Before that the newest remote step may be damaged, so deleting older ones might delete the last valid step.
        if self._remote.knows_valid_step:
            self._remote.retain(None)
        self._wait = _MIN_RETRY_SECONDS if self._error is None else self._wait

    def _missing(self) -> list[int]:
        """Returns the steps to upload. Also uploads the metrics that were added to other steps."""
        self._check()
        remote = self._run.remote.steps
        with remote.store.glance(remote.root):
            todo = self._run.to_upload()
            self._run.upload_metrics()
        return todo

    def _upload(self, step: int) -> None:
        begun = time.monotonic()
        self.step = step
        try:
            copied = self._run.upload(step, self._throttle)
        except (TreeringError, OSError) as error:
            if is_momentary(error) or isinstance(error, LeaseLostError | PeerError):
                raise
            self._report(error)  # The other steps are uploaded nevertheless.
            return
        finally:
            self.step = None
        if copied:
            _log.info("%s: step %d uploaded in %.1f s", self._run.root, step, time.monotonic() - begun)
        self._remote.retain(step)

    def _report(self, error: BaseException) -> None:
        self._error = error
        is_final = isinstance(error, LeaseLostError)
        if not is_final:
            self._begin_later()
        retry = "within ten minutes, and with the next save" if self._timer else "with the next save"
        outcome = "this job uploads no more steps" if is_final else f"it is retried {retry}"
        has_traceback = not isinstance(error, TreeringError | OSError)
        _log.error("%s: uploading steps failed; %s: %s", self._run.root, outcome, error, exc_info=has_traceback)

    def _begin_later(self) -> None:
        """Schedules another attempt, unless one is scheduled."""
        if (self._timer and not self._timer.has_ended) or self._run.host_group:
            return

        def again() -> None:
            self._timer = None
            self.begin()

        self._timer = _Timer(self._wait, again)
        self._timer.daemon = True
        self._wait = min(2 * self._wait, _MAX_RETRY_SECONDS)
        try:
            start_threads(self._timer)
        except SaveError:  # No more threads can start: the next save tries again.
            self._timer = None

    def _throttle(self, nbytes: int, check: Callable[[], None] | None = None) -> None:
        """Waits before bytes are sent, so that the upload stays within the limit.

        check: called meanwhile; an error that it raises cancels the upload. By default it is that of process 0.
        """
        check = check or self._check
        self._pace.spend(nbytes)
        check()
        # Sleep in short naps, so that a cancelled upload ends soon.
        while (left := self._pace.left()) > 0:
            time.sleep(min(left, _POLL_SECONDS))
            check()

    def _check(self) -> None:
        if self._stopped or not self._run.claimed:
            raise _PausedError
        if group := self._run.host_group:
            group.check()


def upload_error(
    root: str, local: str, waiting: Sequence[int], gone: Sequence[int], error: BaseException | None, *, lost: bool
) -> SaveError:
    """Returns the error of a run that lacks steps.

    waiting: the missing steps that a later job can upload from the local tier. gone: those that are damaged there, or
        deleted. error: that of the last upload. lost: True if another job or Checkpointer has the run.
    """
    parts = [f"{root}: some steps were not uploaded"]
    parts += ["another job, or another Checkpointer of this process, has acquired the run"] if lost else []
    parts += [str(error)] if error else []
    listed, damaged = ", ".join(map(str, waiting)), ", ".join(map(str, gone))
    parts += [f"steps {listed} are in {local}; the next job with this local= uploads them"] if waiting else []
    parts += [f"steps {damaged} are damaged in {local}, or deleted"] if gone else []
    problem = SaveError("; ".join(parts))
    problem.__cause__ = error
    return problem


class _Pace:
    """Limits an upload to a number of bytes a second."""

    def __init__(self, bytes_per_second: float | None):
        self._rate = bytes_per_second
        self._free = 0.0  # the time from which more bytes may be sent

    def spend(self, nbytes: int) -> None:
        """Counts bytes that are about to be sent."""
        if self._rate:
            self._free = max(self._free, time.monotonic()) + nbytes / self._rate

    def left(self) -> float:
        """Returns the seconds to wait before they may be sent."""
        return self._free - time.monotonic() if self._rate else 0.0

    def lift(self) -> None:
        """Ends the limit."""
        self._rate = None
