"""The pending saves of one run: running ones, and ended ones whose errors the run's next call still has to raise.

The error policy raises the error of a failed save, or logs it and notifies the user's function.
"""

import contextlib
import logging
from collections.abc import Callable, Container, Iterator
from typing import Literal, NamedTuple

from .._save.pending import PendingSave
from ..errors import MismatchError, TreeringError

OnError = Literal["raise", "log"] | Callable[[BaseException], object]
_log = logging.getLogger("treering")


class Failures:
    """The failures of a run's saves.

    `last_error` is the failure of the newest save that is over, None if it succeeded.
    """

    def __init__(self, on_error: OnError):
        if on_error not in ("raise", "log") and not callable(on_error):
            raise MismatchError(f"on_error={on_error!r}: expected 'raise', 'log' or a function of an error")
        self.raises = on_error == "raise"
        self.last_error: BaseException | None = None
        self._raised_error: BaseException | None = None
        self._on_error = on_error if callable(on_error) else None

    def raise_last(self) -> None:
        """Raises the last failure, once, unless a later save succeeded."""
        if self.last_error is not None and self.last_error is not self._raised_error:
            self._raised_error = self.last_error
            raise self.last_error

    def report(self, error: BaseException) -> None:
        """Logs a failure that is not raised, and calls the user's function with it. Does so once for each failure."""
        if error is self.last_error:
            return
        self.last_error = error
        _log.error("a save failed, and the run continues because of on_error; the next save tries again: %s", error)
        self.notify(error)

    def notify(self, error: BaseException) -> None:
        """Calls the user's function, if there is one, with an error that is already logged."""
        if self._on_error is not None:
            try:
                self._on_error(error)
            except Exception:
                _log.exception("on_error failed")


@contextlib.contextmanager
def log_failure() -> Iterator[None]:
    """Logs the failure of a background save, so that it does not hide the error that is being raised."""
    try:
        yield
    except TreeringError:
        _log.exception("a background save failed as well")


class PendingStatus(NamedTuple):
    """The state of the saves in process 0: `calls` are running; `raises` is True if an ended save raises its error."""

    calls: list[str]
    raises: bool


class PendingSaves:
    """Holds saves in the order of their calls, which is also the order in which they end.

    The run's next call raises the error of a failed save, unless the save's result has raised it. With several
    processes, process 0 decides.
    """

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._saves: list[PendingSave] = []
        self._changing_calls: list[object] = []  # calls that may add a save or change the run

    @contextlib.contextmanager
    def changing_run(self) -> Iterator[None]:
        """Marks the run as being changed. Every change of the run is made within this block."""
        call = object()
        try:
            self._changing_calls.append(call)
            yield
        finally:
            with contextlib.suppress(ValueError):  # An interrupt came before the call was added.
                self._changing_calls.remove(call)

    def busy(self) -> bool:
        """Returns True if the run is being changed, or about to be."""
        return bool(self._changing_calls) or not self.all_done()

    def check_no_save(self) -> None:
        """Raises `MismatchError` if another call than the caller's is changing the run. Call it in `changing_run()`."""
        if len(self._changing_calls) > 1 or not self.all_done():
            raise MismatchError("a save has begun; it looks at this step when it is over")

    def __len__(self) -> int:
        return len(self._saves)

    def add(self, pending: PendingSave) -> None:
        """Adds a save that has begun."""
        self._saves.append(pending)

    def all_done(self) -> bool:
        """Returns True if no save is running."""
        return all(pending.done() for pending in self._saves)

    def status(self) -> PendingStatus:
        """Returns the state of the saves as it is now."""
        running = [pending for pending in self._saves if not pending.done()]
        calls = [pending._call.name for pending in running]
        ended = (pending for pending in self._saves if pending not in running)
        failed = any(pending._error is not None and not pending.reported for pending in ended)
        return PendingStatus(calls, failed and self._failures.raises)

    def wait_for_status(self) -> PendingStatus:
        """Waits until no save is running, and returns the state then."""
        for pending in list(self._saves):
            pending._wait()
        return self.status()

    def steps_of(self, calls: Container[str]) -> set[int | None]:
        """Returns the steps that these calls save."""
        return {pending.step for pending in self._saves if pending._call.name in calls}

    def pending_steps(self) -> set[int]:
        """Returns the steps of the running saves."""
        return {pending.step for pending in self._saves if not pending.done() and pending.step is not None}

    def newest(self) -> PendingSave:
        """Returns the save that ends last."""
        return self._saves[-1]

    def reap(self, status: PendingStatus | None = None) -> None:
        """Waits for all saves except those in `status.calls`, and forgets them. Raises the first failure.

        Without a status, waits for all saves. If `status.raises` is False, failures are only logged. If failures do
        not end the run, the call without a status still raises that of the last save: no later save replaces it.
        """
        ended = [pending for pending in self._saves if status is None or pending._call.name not in status.calls]
        for pending in ended:
            pending._wait()  # Wait before forgetting: an interrupt here loses no save.
        for pending in ended:
            if pending not in self._saves:
                continue  # A signal handler has settled it meanwhile.
            self._saves.remove(pending)
            if pending._error is None:
                self._failures.last_error = None
            elif not pending.reported:
                if status.raises if status else self._failures.raises:
                    pending.result()
                self._report(pending)
        if status is None:
            self._failures.raise_last()

    def _report(self, pending: PendingSave) -> None:
        if self._failures.raises:
            pending.log_error()
        else:
            self._failures.report(pending.take_error())
