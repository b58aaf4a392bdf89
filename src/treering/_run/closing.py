"""The end of a run's writing: waits for saves and uploads, and releases the lock and the handler of SIGTERM."""

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
        """Marks the run as finished when every save is over and every step is uploaded. Raises their failures."""
        self._under_way.settle()
        self._collective.check_open()
        with self._under_way.writing():
            directory = self._directory
            self._collective.once("finish()", directory.finish, first=lambda call: self._upload(call, directory.claim))

    def upload(self) -> None:
        """Returns when every save is over and every step is uploaded, where there is a local tier; once."""
        if isinstance(self._directory, TwoPlaces) and not self._collective.closed:
            claim = self._directory.claim_for_copying

            def settle_and_upload(call: Call) -> None:
                self._collective.settle(call)
                self._upload(call, claim)

            # All processes wait for the one that uploads: a job of which some have ended is not left alone for long.
            self._collective.once("close()", self._directory.copy_all, first=settle_and_upload)

    def _upload(self, call: Call, claim: Callable[[], bool]) -> None:
        """Begins the last upload from each host's disk, where there are several."""
        if together := self._directory.together:
            together.copy_last(call, claim)

    def release(self) -> None:
        """Waits for the saves, and releases the lock of the run and the handler of SIGTERM, whatever raises."""
        self._collective.closed = self._late.closed = True
        try:
            self._under_way.settle()
        finally:
            try:
                if self._under_way.all_over():
                    self._retention.close()
                else:  # an interrupt ended the wait, and a save goes on
                    self._retention.close_after(self._under_way.last())
            finally:
                if self._preemption:
                    self._preemption.close()
