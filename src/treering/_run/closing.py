"""Ends the writing of a run: waits for saves and uploads, and releases the lease and the handler of SIGTERM."""

from collections.abc import Callable

from .._processes.calls import Call
from .._processes.preemption import Preemption
from .collective import Collective
from .directory import Directory
from .late_metrics import LateMetrics
from .retention import Retention
from .saves_under_way import UnderWay
from .two_places import TwoPlaces


class Closing:
    """Closes one run, or finishes it first."""

    def __init__(
        self,
        directory: Directory | TwoPlaces,
        collective: Collective,
        under_way: UnderWay,
        retention: Retention,
        late: LateMetrics,
        preemption: Preemption | None,
    ) -> None:
        self._directory, self._collective, self._under_way = directory, collective, under_way
        self._retention, self._late, self._preemption = retention, late, preemption

    def finish(self) -> None:
        """Waits for every save and upload, then marks the run as finished. Raises the errors of saves and uploads."""
        self._under_way.settle()
        self._collective.check_open()
        with self._under_way.writing():
            directory = self._directory
            self._collective.once("finish()", directory.finish, first=lambda call: self._upload(call, directory.claim))

    def upload(self) -> None:
        """Waits, if there is a local tier, until every save is over and every step is uploaded. Does so once."""
        if isinstance(self._directory, TwoPlaces) and not self._collective.closed:
            claim = self._directory.claim_for_copying

            def settle_and_upload(call: Call) -> None:
                self._collective.settle(call)
                self._upload(call, claim)

            # All processes wait for the one that uploads: launchers may stop a job once some of its processes end.
            self._collective.once("close()", self._directory.copy_all, first=settle_and_upload)

    def _upload(self, call: Call, claim: Callable[[], bool]) -> None:
        """Begins the last upload from each host's disk, if each host has its own."""
        if together := self._directory.together:
            together.copy_last(call, claim)

    def release(self) -> None:
        """Waits for the saves. Releases the lease of the run and the handler of SIGTERM even after an error."""
        self._collective.closed = self._late.closed = True
        try:
            self._under_way.settle()
        finally:
            try:
                if self._under_way.all_over():
                    self._retention.close()
                else:  # An interrupt ended the wait, and a save is still running.
                    self._retention.close_after(self._under_way.last())
            finally:
                if self._preemption:
                    self._preemption.close()
