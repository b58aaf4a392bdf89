"""The saves of one run that are under way, or are over and not settled: the run's next call raises their failures."""

import contextlib
import logging
from collections.abc import Container, Iterator
from typing import NamedTuple

from .._save.pending import PendingSave
from ..errors import MismatchError
from .failures import Failures

_log = logging.getLogger("treering")


class Verdict(NamedTuple):
    """The state of the saves in process 0: the calls that are under way, and whether the failures of others raise."""

    calls: list[str]
    raises: bool


class UnderWay:
    """Saves in the order of the calls, in which they end as well; the run's next call raises the failure of one.

    A failure that the result of a save has raised is not raised again. With several processes, process 0 decides.
    """

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._saves: list[PendingSave] = []
        self._writing: list[object] = []  # calls that may be about to add one, or change the run themselves

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Marks the run as being changed; every change of the run is made within this block."""
        call = object()
        try:
            self._writing.append(call)
            yield
        finally:
            with contextlib.suppress(ValueError):  # an interrupt came first
                self._writing.remove(call)

    def busy(self) -> bool:
        """Whether the run is being changed, or about to be."""
        return bool(self._writing) or not self.all_over()

    def check_no_save(self) -> None:
        """Raises `MismatchError` when a call other than the one that asks, within `writing()`, is changing the run."""
        if len(self._writing) > 1 or not self.all_over():
            raise MismatchError("a save has begun, and looks at it when it is over")

    def __len__(self) -> int:
        return len(self._saves)

    def add(self, pending: PendingSave) -> None:
        """Adds a save that has begun."""
        self._saves.append(pending)

    def all_over(self) -> bool:
        """Whether no save is under way."""
        return all(pending.done() for pending in self._saves)

    def verdict(self) -> Verdict:
        """The verdict on the saves as they are now."""
        calls = [pending._call.name for pending in self._saves if not pending.done()]
        failed = any(pending.failed and not pending.reported for pending in self._saves)
        return Verdict(calls, failed and self._failures.raises)

    def after_all(self) -> Verdict:
        """Waits until no save is under way; returns the verdict then."""
        for pending in list(self._saves):
            pending._wait()
        return self.verdict()

    def steps(self, calls: Container[str]) -> set[int | None]:
        """The steps that these calls save."""
        return {pending.step for pending in self._saves if pending._call.name in calls}

    def pending_steps(self) -> set[int]:
        """Returns the steps of the saves that are under way."""
        return {pending.step for pending in self._saves if not pending.done() and pending.step is not None}

    def last(self) -> PendingSave:
        """The save that ends last."""
        return self._saves[-1]

    def settle(self, verdict: Verdict | None = None) -> None:
        """Waits for all saves but those in `verdict.calls`, and forgets them; raises the first failure.

        Without a verdict it waits for all. With one whose `raises` is False, failures are only logged. Where failures
        do not end the run, that of its last save is raised all the same when all are over, for none makes up for it.
        """
        ended = [pending for pending in self._saves if verdict is None or pending._call.name not in verdict.calls]
        for pending in ended:
            pending._wait()  # an interrupt here forgets none of them
        for pending in ended:
            if pending not in self._saves:
                continue  # the handler of a signal has settled it meanwhile
            self._saves.remove(pending)
            if not pending.failed:
                self._failures.last = None
            elif not pending.reported:
                if verdict.raises if verdict else self._failures.raises:
                    pending.result()
                self._report(pending)
        if verdict is None:
            self._failures.raise_last()

    def _report(self, pending: PendingSave) -> None:
        if self._failures.raises:
            pending.tell_log()
        else:
            self._failures.report(pending.seen())
