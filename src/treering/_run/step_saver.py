"""Saves one step of a run: process 0 decides whether and where, then every process starts the save."""

import contextlib
import functools
import logging
import time
from typing import Any

from .._core.calls import Call
from .._processes import coordinator
from .._processes.preemption import Preemption
from .._save.job import start_save
from .._save.pending import PendingSave, as_save_error
from .._save.target import SaveOptions, encode_info, metadata_to_json
from .._save.unchanged import UnchangedArrays
from ..errors import MismatchError, SaveError, UnsupportedError
from . import resume
from .collective import CollectiveCalls
from .last_state import LastState, StepOptions
from .pending_saves import Failures, PendingSaves, PendingStatus
from .retention import Retention
from .run_directory import HostChanges, RunDirectory
from .schedule import Schedule

_log = logging.getLogger("treering")


class StepSaver:
    """Saves the steps that are due, or that the caller forces, in the background.

    `reuse` is the option of the saves; see `SaveOptions`. `has_looked` is True once steps of the run were found, or
    similar steps and runs were searched for and logged.
    """

    def __init__(
        self,
        directory: RunDirectory,
        collective: CollectiveCalls,
        pending_saves: PendingSaves,
        schedule: Schedule,
        retention: Retention,
        failures: Failures,
        last_state: LastState,
        preemption: Preemption | None,
        *,
        metadata: Any,
        skip_if_busy: bool,
        reuse_unchanged: bool,
    ) -> None:
        self._directory, self._collective, self._pending_saves = directory, collective, pending_saves
        self._schedule, self._retention, self._failures = schedule, retention, failures
        schedule.seconds_since_commit = functools.partial(resume.seconds_since_commit, directory)
        self._last_state, self._preemption = last_state, preemption
        self._metadata, self._skip_if_busy = metadata, skip_if_busy
        self._unchanged = UnchangedArrays(retention.bases) if reuse_unchanged else None
        self.reuse = self._unchanged and self._unchanged.of_save
        self.has_looked = False
        self._saved_step: int | None = None  # the step of the newest save of this job
        self._left_out: int | None = None  # the step of the newest call, if it was not due

    @property
    def preempted(self) -> bool:
        """True once a signal has come, and the state of the newest call of `save` is saved or can be saved."""
        if not (preemption := self._preemption):
            return False
        is_known = preemption.is_handled or (preemption.ask() and self._last_state.is_available)
        if not is_known or preemption.is_ahead:
            return False
        preemption.note_seen()
        return True

    def save(self, step: int, tree: Any, force: bool, options: StepOptions) -> PendingSave | None:
        """Saves a step if it is due. See `Checkpointer.save`."""
        started_at = time.perf_counter()
        if options.on_exists not in ("error", "skip", "overwrite"):
            raise MismatchError(f"on_exists={options.on_exists!r}: expected 'error', 'skip' or 'overwrite'")
        preempted = self._preemption is not None and self._preemption.is_due(step)
        force = force or preempted
        pending = self._left_out = None
        try:
            with self._pending_saves.changing_run():
                pending = self._save_if_due(started_at, step, tree, force, options)
            if pending:
                self._saved_step = step
            # The run may have the step: with on_exists="skip", or if the job saved it or continued from it.
            elif options.on_exists != "skip" and step not in (self._saved_step, self._directory.restored_step):
                self._left_out = step
            if self._preemption:
                self._preemption.note(step, is_saved=force or pending is not None, was_due=preempted)
            if pending:
                pending._wait_if_exiting()
            return pending
        except SaveError as error:
            if self._failures.raises:
                raise
            self._failures.report(error)
            return None
        finally:
            self._last_state.remember(step, tree, options, pending)

    def log_left_out(self) -> None:
        """Logs, once, that the loop ends with a step that is not saved: a warning if it has saved none at all."""
        step, self._left_out = self._left_out, None
        if step is not None and coordinator.process_index_and_count()[0] == 0:
            busy = ", or came while another one was being saved" if self._skip_if_busy else ""
            _log.log(
                logging.WARNING if self._saved_step is None else logging.INFO,
                "%s: closed without saving step %d, the newest, which was not due%s; force=True saves it",
                self._directory.root, step, busy,
            )  # fmt: skip

    def _save_if_due(
        self, started_at: float, step: int, tree: Any, force: bool, options: StepOptions
    ) -> PendingSave | None:
        several = coordinator.is_multi_process()
        # Peers see a failure at different times, so with several processes the status of process 0 decides.
        if not several:
            self._pending_saves.reap(self._pending_saves.status())
        # By a number of steps, all processes decide alike. Else process 0 asks the clock or the user's function.
        if not (force or (several and not self._schedule.by_number) or self._schedule.is_due(step)):
            return None
        self._collective.check_open()
        with self._collective.call(f"save({step})") as call:
            uploads = self._directory.uploads
            host_changes = uploads.host_changes if uploads else None
            status_fields, destination, orders, lease_seconds = call.broadcast(
                lambda: self._decide_save(step, options.on_exists, force, several, host_changes)
            )
            status = PendingStatus(*status_fields)
            self._pending_saves.reap(status)
            if destination is None:
                call.close()
                return None
            deciding = time.perf_counter()
            if status.calls:
                self._collective.wait_for_saves(call)
            waited = time.perf_counter() - deciding
            path, overwrite = destination
            try:
                if host_changes:
                    path = host_changes.prepare(path, orders, self._directory.back_to)
                pending = self._start(
                    call, path, overwrite, step, tree, options, host_changes, started_at, waited, lease_seconds
                )
            except BaseException as error:
                if several:  # All processes must have the same list of saves.
                    self._pending_saves.add(PendingSave._already_failed(path, step, call, error))
                raise
        self._directory.back_to = None
        self._pending_saves.add(pending)
        self._schedule.on_save_started()
        pending._warn_of_stall()
        return pending

    def _decide_save(
        self, step: int, on_exists: str, force: bool, several: bool, host_changes: HostChanges | None
    ) -> tuple[PendingStatus, tuple[str, bool] | None, Any, float]:
        """Returns the state of earlier saves, where to save (None to skip the step), and the run's state for peers.

        "Where" is the path, and True to overwrite. The last element is the seconds of a wait for the run's lease.
        Called in process 0. Raises `ExistsError`.
        """
        status = self._pending_saves.status()
        if status.raises:
            return status, None, None, 0.0
        if not force and (several and not self._schedule.is_due(step)):
            return status, None, None, 0.0
        if not force and self._skip_if_busy and status.calls:
            return status, None, None, 0.0
        before = self._directory.lease_seconds
        with as_save_error(self._directory.root):
            self._look()
            place = self._directory.reserve_step(step, on_exists, self._pending_saves.steps_of(status.calls))
            # A lease in a bucket may take longer than `timeout`. Peers that did not wait here would be in their next
            # call by then, and miss this process there. A process alone acquires it once the tree is checked.
            if several and place is not None:
                self._directory.acquire_run()
            waited = self._directory.lease_seconds - before
            return status, place, host_changes and host_changes.orders(), waited

    def _look(self) -> None:
        """Logs similar steps and runs, once, if the run has no steps. Raises `MismatchError` if it can be no run.

        Does nothing with a local tier, or in a bucket, where it takes requests.
        """
        if self.has_looked or self._directory.uploads or not self._directory.steps.store.has_folders:
            return
        with contextlib.suppress(UnsupportedError):  # `restore_or_init` raises it.
            resume.has_steps(self._directory)  # called for what it logs
        self.has_looked = True

    def _start(
        self,
        call: Call,
        path: str,
        overwrite: bool,
        step: int,
        tree: Any,
        options: StepOptions,
        host_changes: HostChanges | None,
        started_at: float,
        waited: float,
        lease_seconds: float,
    ) -> PendingSave:
        layout = self._directory.steps.layout
        requested = SaveOptions(
            layout.format, overwrite, options.rules, options.dtype, options.memory_limit, True, False,
            layout.format_options,
            hosts=host_changes.hosts if host_changes else None,
            copies=host_changes.local_copies if host_changes else 1,
            room_maker=self._retention,
            reuse=self.reuse,
        )  # fmt: skip
        info = encode_info(step, options.metrics, _merged_metadata(self._metadata, options.metadata))
        return start_save(call, path, tree, info, requested, self._retention, started_at, waited, lease_seconds)


def _merged_metadata(run_metadata: Any, step_metadata: Any) -> Any:
    """Returns the metadata of one step, from that of the run and that given with the step."""
    run_metadata, step_metadata = metadata_to_json(run_metadata), metadata_to_json(step_metadata)
    if isinstance(run_metadata, dict) and isinstance(step_metadata, dict):
        return {**run_metadata, **step_metadata}
    return run_metadata if step_metadata is None else step_metadata
