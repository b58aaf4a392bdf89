"""Ends the writing of a run: waits for saves and uploads, and releases the lease and the handler of SIGTERM."""

from collections.abc import Callable

from .._core.calls import Call
from .._processes.preemption import Preemption
from .collective import CollectiveCalls
from .metrics import LateMetrics
from .pending_saves import PendingSaves
from .retention import Retention
from .run_directory import RunDirectory


class Closing:
    """Closes one run, or finishes it first."""

    def __init__(
        self,
        directory: RunDirectory,
        collective: CollectiveCalls,
        pending_saves: PendingSaves,
        retention: Retention,
        late: LateMetrics,
        preemption: Preemption | None,
    ) -> None:
        self._directory, self._collective, self._pending_saves = directory, collective, pending_saves
        self._retention, self._late_metrics, self._preemption = retention, late, preemption

    def finish(self) -> None:
        """Waits for every save and upload, then marks the run as finished. Raises the errors of saves and uploads."""
        self._pending_saves.reap()
        self._collective.check_open()
        with self._pending_saves.changing_run():
            directory = self._directory
            self._collective.run_on_process_0(
                "finish()", directory.finish,
                on_all_processes=lambda call: self._upload(call, directory.acquire_run), afterwards=self._clear,
            )  # fmt: skip

    def upload(self) -> None:
        """Waits, if there is a local tier, until every save is over and every step is uploaded. Does so once."""
        uploads = self._directory.uploads
        if uploads and not self._collective.closed:
            uploads.lift_limit()
            claim = uploads.acquire_for_upload

            def settle_and_upload(call: Call) -> None:
                self._collective.wait_for_saves(call)
                self._upload(call, claim)

            # All processes wait for the one that uploads: launchers may stop a job once some of its processes end.
            self._collective.run_on_process_0(
                "close()", uploads.upload_all, on_all_processes=settle_and_upload, afterwards=self._clear
            )

    def _upload(self, call: Call, claim: Callable[[], bool]) -> None:
        """Begins the last upload from each host's disk, if each host has its own."""
        uploads = self._directory.uploads
        if uploads and (host_changes := uploads.host_changes):
            host_changes.upload_last(call, claim)

    def _clear(self, call: Call) -> None:
        """Removes the local steps from memory, now that the job ends well."""
        if uploads := self._directory.uploads:
            self._retention.wait_for_hooks()  # They may add metrics to local steps.
            uploads.clear_memory(call)

    def release(self) -> None:
        """Waits for the saves. Releases the lease of the run and the handler of SIGTERM even after an error."""
        self._collective.closed = self._late_metrics.closed = True
        if uploads := self._directory.uploads:
            uploads.lift_limit()
        try:
            self._pending_saves.reap()
        finally:
            try:
                if self._pending_saves.all_done():
                    self._retention.close()
                else:  # An interrupt ended the wait, and a save is still running.
                    self._retention.close_after(self._pending_saves.newest())
            finally:
                if self._preemption:
                    self._preemption.close()
