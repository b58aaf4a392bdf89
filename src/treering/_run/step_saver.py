"""Saves one step of a run: process 0 decides whether and where, then every process starts the save."""

import contextlib
import time
from typing import Any

from .._processes import coordinator
from .._processes.calls import Call
from .._processes.preemption import Preemption
from .._save import save as _save
from .._save.metadata import plain
from .._save.options import SaveOptions
from .._save.pending import PendingSave, as_save_error
from ..errors import MismatchError, SaveError, UnsupportedError
from . import resume
from .collective import Collective
from .directory import Directory
from .failures import Failures
from .last_state import LastState, StepOptions
from .retention import Retention
from .saves_under_way import UnderWay, Verdict
from .schedule import Schedule
from .two_places import TwoPlaces


class StepSaver:
    """Saves the steps that are due, or that the caller forces, in the background.

    `preempted` is True once the step at which the job is to stop is saved or being saved. `has_looked` is True once
    the run has steps, or a search for similar steps and runs was made.
    """

    def __init__(
        self,
        directory: Directory | TwoPlaces,
        collective: Collective,
        under_way: UnderWay,
        schedule: Schedule,
        retention: Retention,
        failures: Failures,
        last_state: LastState,
        preemption: Preemption | None,
        *,
        metadata: Any,
        skip_if_busy: bool,
    ) -> None:
        self._directory, self._collective, self._under_way = directory, collective, under_way
        self._schedule, self._retention, self._failures = schedule, retention, failures
        self._last, self._preemption = last_state, preemption
        self._metadata, self._skip_if_busy = metadata, skip_if_busy
        self.preempted = self.has_looked = False

    def save(self, step: int, tree: Any, force: bool, options: StepOptions) -> PendingSave | None:
        """Saves a step if it is due. See `Checkpointer.save`."""
        begun = time.perf_counter()
        if options.on_exists not in ("error", "skip", "overwrite"):
            raise MismatchError(f"on_exists={options.on_exists!r}: expected 'error', 'skip' or 'overwrite'")
        pending = None
        try:
            with self._under_way.writing():
                pending = self._save_if_wanted(begun, step, tree, force, options)
            return pending
        except SaveError as error:
            if self._failures.raises:
                raise
            self._failures.report(error)
            return None
        finally:
            self._last.note(step, tree, options, pending)

    def _save_if_wanted(
        self, begun: float, step: int, tree: Any, force: bool, options: StepOptions
    ) -> PendingSave | None:
        several = coordinator.several()
        if not several:  # Several processes would raise a failure at different steps.
            self._under_way.settle(self._under_way.verdict())
        preempted = bool(self._preemption) and not self.preempted and self._preemption.reached()
        force = force or preempted
        # Process 0 asks the clock or the user's function for all processes, because their answers differ.
        if not (force or (several and not self._schedule.by_number) or self._schedule.due(step)):
            return None
        self._collective.check_open()
        with self._collective.call(f"save({step})") as call:
            said, admitted, word = call.broadcast(lambda: self._admit(step, options.on_exists, force, several))
            verdict = Verdict(*said)
            self._under_way.settle(verdict)
            if admitted is None:
                call.close()
                self.preempted = self.preempted or preempted
                return None
            deciding = time.perf_counter()
            if verdict.calls:
                self._collective.settle(call)
            waited = time.perf_counter() - deciding
            path, overwrite = admitted
            try:
                if together := self._directory.together:
                    path = together.prepare(path, word, self._directory.back_to)
                pending = self._start(call, path, overwrite, step, tree, options, begun, waited)
            except BaseException as error:
                if several:  # All processes must have the same list of saves.
                    self._under_way.add(PendingSave._of_failure(path, step, call, error))
                raise
        self._directory.back_to = None
        self._under_way.add(pending)
        self._schedule.begun()
        pending._warn_of_stall()
        self.preempted = self.preempted or preempted
        return pending

    def _admit(
        self, step: int, on_exists: str, force: bool, several: bool
    ) -> tuple[Verdict, tuple[str, bool] | None, Any]:
        """Returns the state of earlier saves, where to save (None to skip the step), and the run's state for peers.

        "Where" is the path, and True to overwrite. Called in process 0. Raises `ExistsError`.
        """
        verdict = self._under_way.verdict()
        if verdict.raises:
            return verdict, None, None
        if not force and (several and not self._schedule.due(step)):
            return verdict, None, None
        if not force and self._skip_if_busy and verdict.calls:
            return verdict, None, None
        with as_save_error(self._directory.root):
            self._look()
            place = self._directory.place_for(step, on_exists, self._under_way.steps(verdict.calls))
            together = self._directory.together
            return verdict, place, together and together.word()

    def _look(self) -> None:
        """Logs similar steps and runs, once, if the run has no steps; not in a bucket, where it takes requests."""
        if self.has_looked or isinstance(self._directory, TwoPlaces) or not self._directory.steps.store.has_folders:
            return
        with contextlib.suppress(MismatchError, UnsupportedError):  # `restore_or_init` raises these.
            resume.has_begun(self._directory)
        self.has_looked = True

    def _start(
        self,
        call: Call,
        path: str,
        overwrite: bool,
        step: int,
        tree: Any,
        options: StepOptions,
        begun: float,
        waited: float,
    ) -> PendingSave:
        requested = SaveOptions(
            "treering", overwrite, options.rules, options.dtype, options.memory_limit, True, False, {},
            own_disks=self._directory.together is not None,
        )  # fmt: skip
        info = _save.describe(step, options.metrics, _combined(self._metadata, options.metadata))
        return _save.start(call, path, tree, info, requested, self._retention, begun, waited)


def _combined(of_run: Any, of_step: Any) -> Any:
    """Returns the metadata of one step, from that of the run and that given with the step."""
    of_run, of_step = plain(of_run), plain(of_step)
    if isinstance(of_run, dict) and isinstance(of_step, dict):
        return {**of_run, **of_step}
    return of_run if of_step is None else of_step
