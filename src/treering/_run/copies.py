"""Copying the steps of a run in the background, from where they are saved to where they stay."""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from .._threads.pool import start
from ..errors import MismatchError, PeerError, SaveError, TreeringError
from ..stores.claims import TakenOverError
from ..stores.read_errors import is_momentary
from .chores import Chores
from .retention import Retention

if TYPE_CHECKING:
    from .host_disks import HostDisks
    from .two_places import TwoPlaces

_log = logging.getLogger("treering")
_NAP_SECONDS = 0.2
_AGAIN_SECONDS, _MOST_SECONDS = 10.0, 600.0  # between one attempt that failed and the next: longer after each


class _PausedError(Exception):
    """Copying was interrupted, for the run is changed or has been left."""

    def __str__(self) -> str:
        return "copying was interrupted"


class Copies:
    """Copies what is lacking, one step after the other, the newest first.

    `step` is the one that is being copied. What fails is logged, and tried again: after a while, with the next save and
    at the end.
    """

    def __init__(
        self,
        places: "TwoPlaces",
        far: Retention,
        bytes_per_second: float | None,
        tell: Callable[[BaseException], None],
        timeout: float,
    ):
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise MismatchError(f"upload_limit={bytes_per_second!r}: expected a number of bytes a second above 0")
        self.step: int | None = None
        self._places, self._far, self._tell, self._timeout = places, far, tell, timeout
        self._chores = Chores()
        self._pace = _Pace(bytes_per_second)
        self._one = threading.Lock()  # held by the only one who copies, or changes the run otherwise
        self._stopped = False
        self._error: BaseException | None = None  # of the last attempt
        self._told: BaseException | None = None  # the error that the user's function was given last
        self._wait = _AGAIN_SECONDS  # before the next attempt, if this one fails
        self._timer: threading.Timer | None = None

    @property
    def busy(self) -> bool:
        """Whether there is work under way or queued."""
        return self._chores.busy

    @property
    def error(self) -> BaseException | None:
        """That of the last attempt."""
        return self._error

    @property
    def taken_over(self) -> BaseException | None:
        """The error by which the last attempt has found that another job writes the run."""
        return self._error if isinstance(self._error, TakenOverError) else None

    def begin(self) -> None:
        """Begins to copy what is lacking; not where all processes must begin it."""
        if self._places.claimed and not self._places.disks:
            self._chores.add("copying steps", self._copy_all)

    def begin_together(
        self,
        disks: "HostDisks",
        after: str,
        process: int,
        *,
        only: int | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins it in this process, and in all others.

        only: a step that is copied alone, without a limit, whatever the policy says.
        then: called in process 0 before the others tidy up.
        """
        what, timeout = f"{self._places.root}: copying steps after {after}", self._timeout
        if process == 0:
            meeting = functools.partial(disks.round, what, timeout)
            self._chores.add(what, lambda: self._copy_all(meeting, only, then))
        else:
            moved = self._moved if only is None else lambda nbytes, look: look()
            self._chores.add(what, lambda: disks.follow(what, timeout, moved))

    def interrupt(self, process: int) -> None:
        """Gives up what all have begun together; process 0 waits until that is so."""
        if process == 0:
            self._stop()
            try:
                self._chores.wait()
            finally:
                self._stopped = False

    def _stop(self) -> None:
        self._stopped = True
        if disks := self._places.disks:
            disks.give_up(_PausedError())

    def wait(self) -> None:
        """Waits until what has begun is over."""
        self._chores.wait()
        self._far.wait()

    def lift_limit(self) -> None:
        """Ends the limit of bytes a second."""
        self._pace.lift()

    def check(self) -> None:
        """Tries again after an error. Raises `TakenOverError` when copying has found that another job writes the run.

        Called in the caller's thread, where the user's function is told of errors.
        """
        if error := self.taken_over:
            raise error
        error = self._error
        if error and error is not self._told and not isinstance(error, _PausedError):
            self._told = error
            self._tell(error)
        if error and not self.busy:
            self.begin()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Copies nothing within a `with` block; a copy that is under way is given up, and begun anew after it."""
        self._stop()
        try:
            with self._one:
                yield
        finally:  # after an interrupt as well
            self._stopped = False
            self.begin()

    def finish(self) -> BaseException | None:
        """Waits until all is copied, without a limit, and old steps are deleted. Returns the error of the attempt."""
        self._pace.lift()
        if timer := self._timer:
            timer.cancel()
            self._timer = None
        self.begin()
        self.wait()
        return self._error

    def _copy_all(
        self,
        meeting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        only: int | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        try:
            with meeting(), self._one:
                if not self.taken_over:  # for good: what is far may be replaced by the other job's
                    self._copy_lacking(only)
                    then()
        except _PausedError as error:  # it starts over when the run was changed
            self._error = error
        except BaseException as error:  # whatever it is, `finish` must not say that all is copied
            self._report(error)

    def _copy_lacking(self, only: int | None) -> None:
        self._error = None
        tried: set[int] = set()
        self._check()
        self._far.remove_leftovers()
        if only is not None:
            self._far.wait()  # it may have been dropped there, and its files be on their way out
            self._copy(only, at_once=True)
            return
        while todo := [step for step in self._lacking() if step not in tried]:
            tried.add(todo[0])
            self._copy(todo[0])
        if self._far.knows_good_step:
            self._far.retain(None)
        self._wait = _AGAIN_SECONDS if self._error is None else self._wait

    def _lacking(self) -> list[int]:
        """The steps to copy; what was added to the others is copied."""
        self._check()
        far = self._places.far.steps
        with far.store.glance(far.root):
            todo = self._places.to_copy()
            self._places.copy_metrics()
        return todo

    def _copy(self, step: int, *, at_once: bool = False) -> None:
        begun = time.monotonic()
        self.step = step
        try:
            copied = self._places.copy(step, (lambda nbytes: self._check()) if at_once else self._moved)
        except (TreeringError, OSError) as error:
            if is_momentary(error) or isinstance(error, TakenOverError | PeerError):
                raise
            self._report(error)  # and the others are copied all the same
            return
        finally:
            self.step = None
        if copied:
            _log.info("%s: step %d copied in %.1f s", self._places.root, step, time.monotonic() - begun)
        self._far.retain(step)

    def _report(self, error: BaseException) -> None:
        self._error = error
        when = "with the next save" if self._places.disks else "after a while, and with the next save"
        about = f"%s: copying steps failed; it is tried again {when}: %s"
        _log.error(about, self._places.root, error, exc_info=not isinstance(error, TreeringError | OSError))
        if not isinstance(error, TakenOverError):
            self._begin_later()

    def _begin_later(self) -> None:
        """Starts over after a while, unless that is to happen already."""
        if self._timer or self._places.disks:
            return

        def again() -> None:
            self._timer = None
            self.begin()

        self._timer = threading.Timer(self._wait, again)
        self._timer.daemon = True
        self._wait = min(2 * self._wait, _MOST_SECONDS)
        try:
            start(self._timer)
        except SaveError:  # no more threads are allowed: the next save tries again
            self._timer = None

    def _moved(self, nbytes: int, look: Callable[[], None] | None = None) -> None:
        look = look or self._check
        self._pace.spend(nbytes)
        look()
        while (left := self._pace.left()) > 0:
            time.sleep(min(left, _NAP_SECONDS))
            look()

    def _check(self) -> None:
        if self._stopped or not self._places.claimed:
            raise _PausedError
        if disks := self._places.disks:
            disks.look()


class _Pace:
    """A limit of bytes a second."""

    def __init__(self, bytes_per_second: float | None):
        self._rate = bytes_per_second
        self._free = 0.0  # when the bytes so far have taken their time

    def spend(self, nbytes: int) -> None:
        """Counts bytes that are about to go."""
        if self._rate:
            self._free = max(self._free, time.monotonic()) + nbytes / self._rate

    def left(self) -> float:
        """The seconds to wait until they may."""
        return self._free - time.monotonic() if self._rate else 0.0

    def lift(self) -> None:
        """Ends the limit."""
        self._rate = None
