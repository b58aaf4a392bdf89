"""Retention: deletes the steps that the policy does not keep, and the leftovers of killed jobs."""

import contextlib
import logging
import posixpath
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from .._core import units
from .._core.leaf_paths import name_known
from .._core.values import decode_float
from .._save.pending import PendingSave, SaveReport
from .._save.save_reuse import Bases
from .._save.target import Info
from ..errors import CorruptError, MismatchError, SaveError, UnsupportedError
from ..formats.orbax import run as orbax_removal
from ..formats.treering import pins, removal, summary
from ..keep import Policy, Saved, with_bases
from ..stores.file_io import remove_unused
from ..stores.lease_registry import LeaseLostError
from ..stores.store import LOCK_NAME
from ..stores.temporary_names import clock_probe_target, final_name
from . import run_layout
from .background_queue import BackgroundQueue
from .run_directory import RunDirectory
from .step_catalog import SavedStep, unwanted_emptied

_log = logging.getLogger("treering")
# A job makes so many saves before it says that no step has metrics at all: an evaluation may be on its way.
_EVALUATED_WITHIN = 8


class Retention:
    """The `SaveHooks` of a run. An error after the commit is logged and does not fail the save."""

    def __init__(
        self,
        directory: RunDirectory,
        keep: Policy | None,
        on_save: Callable[[SaveReport], object] | None = None,
        on_commit: Callable[[SaveReport], None] = lambda report: None,
    ):
        self._directory, self._steps = directory, directory.steps
        self._keep, self._on_save, self._on_commit = keep, on_save, on_commit
        self._release_error: SaveError | None = None  # the error of releasing the run
        self._has_valid_step = False  # True once this job has saved or uploaded a step here
        self._has_cleaned = False
        self._has_uncommitted_save = False  # set when a save begins, cleared by its commit
        # Metrics that no step had when it was logged: the names and the number of steps that there were.
        self._logged_metrics: dict[str, tuple[frozenset[str], int]] = {}
        self._saves_without_metrics = 0
        self._has_warned_of_room = False
        self._logged_links: set[str] = set()  # steps that stay because links lead to them, already logged
        self._logged_denials: set[str] = set()  # steps that stay because this user may not delete them, already logged
        # A slow hook must not delay deletions, and a save may have to wait for the deletions alone. The release of the
        # run waits for the other two queues.
        self._deletion_queue, self._hook_queue, self._release_queue = (
            BackgroundQueue(),
            BackgroundQueue(),
            BackgroundQueue(),
        )

    def on_start(self) -> float:
        """Acquires the lease of the run. Returns the seconds that took. Raises `ExistsError` if another has it."""
        before = self._directory.lease_seconds
        self._directory.acquire_for_save()
        return self._directory.lease_seconds - before

    def before_write(self) -> None:
        """Prepares a save. Before the first one, removes leftovers of killed jobs and the mark of a finished run."""
        needs_room = self._directory.before_write(self.retain)
        if needs_room or self._has_uncommitted_save:  # The last save may have failed because the disk was full.
            self._deletion_queue.wait()
        self._has_uncommitted_save = True
        if self._has_cleaned:
            return
        try:
            try:
                self._directory.clear_finished()
            except PermissionError as error:
                _log.error("%s: stays marked as finished; programs that follow it may end: %s", self._steps.root, error)
            self._collect_garbage()
            self._has_cleaned = True
        except OSError:
            _log.exception("removing leftovers of earlier jobs failed; the next save tries again")

    def wait_for_room(self, problem: str, step: int | None, check: Callable[[], None]) -> str | None:
        """Waits until old steps are deleted; see `_save.room.RoomMaker`."""
        if self._deletion_queue.busy:
            self._deletion_queue.wait()
            return None
        if uploads := self._directory.uploads:
            reason = uploads.wait_for_room(problem, lambda: self.retain(step), check)
            self._deletion_queue.wait()
            return reason
        return "no deletion or upload is under way that frees room"

    def free_on_all_hosts(self) -> None:
        """Deletes the files of deleted steps on all hosts, if each host has its own disk."""
        uploads = self._directory.uploads
        if uploads and uploads.host_changes:
            uploads.host_changes.free_room()

    def collect_garbage(self) -> None:
        """Removes the leftovers of killed jobs, once."""
        if not self._has_cleaned:
            self._collect_garbage()
            self._has_cleaned = True

    def _collect_garbage(self) -> None:
        store, root = self._steps.store, self._steps.root
        is_tier = store.stat(posixpath.join(root, run_layout.JOURNAL)) is not None
        for place in (root, *run_layout.archived_runs(store, root)):
            for name in store.list(place):
                target = final_name(name)
                if target and run_layout.parse_step_name(target, self._steps.prefix) is not None:
                    remove_unused(store, posixpath.join(place, name))
                if run_layout.parse_step_name(name, self._steps.prefix) is not None:
                    step = posixpath.join(place, name)
                    # A link is not part of the run. In a local tier, an archived folder without a manifest is a part of
                    # a step that another disk may have.
                    is_part = is_tier and place != root and summary.stat_manifest(store, step) is None
                    if not (is_part or store.is_link(step)):
                        removal.collect_garbage(store, step, remove_empty=True)
                elif not store.has_locks and clock_probe_target(name) == LOCK_NAME:  # a killed writer's
                    with contextlib.suppress(FileNotFoundError):
                        store.delete(posixpath.join(place, name))
        if self._steps.layout.removes_unfinished:
            orbax_removal.remove_unfinished(
                store, root, lambda name: run_layout.parse_step_name(name, self._steps.prefix) is not None
            )
        run_layout.sync_archived(store, root)

    def after_commit(self, report: SaveReport) -> None:
        """Follows a commit: deletes the steps that the policy does not keep, and calls `on_save` in another thread."""
        self._has_uncommitted_save = False
        self._directory.on_commit(report.step, self.retain)
        self._on_commit(report)
        if on_save := self._on_save:
            self._hook_queue.add("on_save", lambda: on_save(report))
        if self._deletion_queue.busy:  # The deletions under way make room.
            self._deletion_queue.add("looking at the free room", lambda: self._warn_if_room_ends(report))
        else:
            self._warn_if_room_ends(report)

    def _warn_if_room_ends(self, report: SaveReport) -> None:
        """Logs once that two more saves like the last one will not fit on the disk, until there is room again."""
        ask = getattr(self._steps.store, "free_bytes", None)  # Only a file system knows.
        free, needed = ask(self._steps.root) if ask else None, 2 * (report.nbytes - report.shared_bytes)
        ends = free is not None and free < needed
        if ends and not self._has_warned_of_room:
            text = "%s: two more saves will not fit: they need %s, and %s are free; delete steps, or keep fewer"
            _log.warning(text, self._steps.root, units.nbytes(needed), units.nbytes(free))
        self._has_warned_of_room = ends

    def after_commit_all(self, report: SaveReport) -> None:
        """Follows a commit in all processes: begins an upload if each host has its own disk."""
        uploads = self._directory.uploads
        if report.step is not None and uploads and uploads.host_changes:
            uploads.host_changes.saved(report.step)

    def close(self) -> None:
        """Waits for all background jobs, and releases the lease of the run.

        After an interrupt of this wait, both continue in the background.

        Raises `SaveError` if steps could not be uploaded.
        """
        self._queue_release()
        self._release_queue.wait()
        if problem := self._release_error:
            self._release_error = None
            raise problem

    def wait(self) -> None:
        """Waits for the deletions that were queued so far."""
        self._deletion_queue.wait()

    def wait_for_hooks(self) -> None:
        """Waits for the calls of `on_save` that were queued so far."""
        self._hook_queue.wait()

    def close_after(self, last: PendingSave) -> None:
        """Releases the lease of the run in the background, once the save `last` and all background jobs are over."""

        self._release_queue.add("waiting for the last save", last._wait)
        self._queue_release()

    def _queue_release(self) -> None:
        """Queues the release of the run's lease after all jobs."""

        def release() -> None:
            self._hook_queue.wait()
            if self._directory.is_held:  # Metrics may have come since the last save, also from hooks.
                self.retain_late()
                self._warn_without_metrics()
            self._deletion_queue.wait()
            self._release_error = self._directory.end_writing()

        self._release_queue.add("releasing the run", release)

    def retain(self, *protected: int | None) -> None:
        """Deletes the steps that the policy does not keep, except the `protected` ones, such as a step just saved.

        Never deletes `RunDirectory.protected_steps`. Logs errors.
        """
        with self._logging_errors():
            self._retain(protected)

    def retain_late(self, guard: Callable[[], None] | None = None) -> None:
        """Does what `retain` does, but only if a metric that the policy uses came after its step was saved.

        `guard` raises `MismatchError` if a step must stay; see `removal.remove`. After a restore of an earlier step it
        does nothing: the policy would judge the later steps too, which the next save archives.
        """
        with self._logging_errors():
            if self._directory.back_to is None and self.has_late_metrics():
                self._retain((), guard)

    def has_late_metrics(self, protected: Collection[int | None] = ()) -> bool:
        """Returns True if a metric that the policy uses came late, and a step has to be deleted."""
        if self._keep is None or not self._keep.metrics:
            return False
        saved, committed = self._list_steps()
        if not any(self._keep.metrics & one.late_metrics for one in saved):
            return False
        unwanted = self._steps_to_delete(saved, committed, self._steps_to_keep(self._keep, saved, protected))
        linked = self._links_to_steps() if unwanted else {}
        return any(not self._is_protected(step, path, linked) for step, path in unwanted.items())

    @contextlib.contextmanager
    def _logging_errors(self) -> Iterator[None]:
        try:
            yield
        except LeaseLostError as error:
            _log.error("%s: old steps are not deleted: %s", self._steps.root, error)
        except Exception:  # A policy may be the user's code, and the step is committed.
            _log.exception("deleting old steps failed; it is tried again after the next save")

    def _list_steps(self, *, events: bool = True) -> tuple[Sequence[SavedStep], Mapping[int, str]]:
        """Returns the valid steps, see `StepCatalog.valid_steps`, and the paths of the committed ones."""
        with self._steps.store.glance(self._steps.root):
            return self._steps.valid_steps(events=events), self._steps.committed()

    def bases(self, info: Info, nbytes: int) -> Bases | None:
        """Returns the steps whose files a save may share; None if they cannot be found, which is logged.

        info, nbytes: the information that is recorded with the save, and the size of its arrays.
        """
        try:
            return self._find_bases(info, nbytes)
        except Exception:  # A policy may be the user's code.
            _log.exception("%s: steps with the same arrays are not found; all arrays are written", self._steps.root)
            return None

    def _find_bases(self, info: Info, nbytes: int) -> Bases:
        if self._keep is None:  # All steps stay, so their manifests need not be read.
            committed = self._steps.committed()
            others = [path for step, path in committed.items() if step != info.step]
            return Bases([*committed.values()][::-1], others[-1] if others else None, committed.values())
        saved, committed = self._list_steps(events=bool(self._keep.metrics))
        others = [one for one in saved if one.step != info.step]
        keep, metrics = self._keep, {name: decode_float(value) for name, value in info.metrics.items()}
        new = Saved(info.step or 0, metrics, time.time(), nbytes)

        def kept(steps: Sequence[Saved]) -> list[str]:
            wanted = self._steps_to_keep(keep, steps, ())
            own = [(one.step, committed[one.step]) for one in steps if one.step in committed]
            return [path for step, path in own if step in wanted or pins.is_pinned(self._steps.store, path)]

        stay = set(kept(sorted([*others, new], key=lambda one: one.step))) - {committed.get(new.step)}
        newest_first = list(reversed(kept(saved)))
        newest_kept = next((path for path in newest_first if path in stay), None)
        return Bases(newest_first, newest_kept, committed.values())

    def _emptied_to_delete(
        self, keep: Policy, saved: Sequence[Saved], committed: Mapping[int, str], protected: Collection[int | None]
    ) -> dict[int, str]:
        """Returns the emptied steps that the policy would not keep, and their paths. Logs them."""
        others = sorted(committed.keys() - {one.step for one in saved})
        emptied = [found for step in others if (found := self._steps.read_emptied(step, committed[step]))]
        unwanted = unwanted_emptied(saved, emptied, lambda steps: self._steps_to_keep(keep, steps, protected))
        for step in unwanted:
            _log.warning(
                "%s: only the manifest is left of step %d, and `keep` does not keep that step, so it is deleted; the "
                "manifest was written after the step had been deleted, or another program removed the arrays",
                self._steps.root, step,
            )  # fmt: skip
        return {step: committed[step] for step in unwanted}

    @property
    def knows_valid_step(self) -> bool:
        """True if this job has saved, uploaded or restored a step here. Before that, all steps may be damaged."""
        return self._has_valid_step or bool(self._directory.protected_steps())

    def _steps_to_keep(
        self, keep: Policy, saved: Sequence[Saved], protected: Collection[int | None]
    ) -> set[int | None]:
        """Returns the steps that stay. Some of them may not exist."""
        others = {*self._directory.protected_steps(), *protected, *(one.step for one in saved[-1:])}
        return {*keep.kept(saved), *with_bases(saved, others)}

    def _retain(self, protected: Collection[int | None], guard: Callable[[], None] | None = None) -> None:
        if self._keep is None:
            return
        # `protected` has steps that this job has saved, uploaded or restored.
        self._has_valid_step = self._has_valid_step or any(step is not None for step in protected)
        for step in protected:
            if step is not None:
                self._steps.forget(step)
        # What is known decides whether anything has to be deleted. Before a deletion, all steps are looked at.
        recalled = self._steps.recall_valid_steps(self._keep.metrics)
        if recalled and {one.step for one in recalled} <= self._steps_to_keep(self._keep, recalled, protected):
            self._warn_of_unknown_metrics(recalled, self._keep.metrics)
            return
        saved, committed = self._list_steps()
        self._steps.record_events()
        self._warn_of_unknown_metrics(saved, self._keep.metrics)
        unwanted = self._steps_to_delete(saved, committed, self._steps_to_keep(self._keep, saved, protected))
        unwanted.update(self._emptied_to_delete(self._keep, saved, committed, protected))
        linked = self._links_to_steps() if unwanted else {}
        bases = {one.step: one.base for one in saved if one.base is not None}
        # A step goes before the base that it is stored as the difference to.
        for step, path in sorted(unwanted.items(), reverse=True) if bases else unwanted.items():
            try:
                if step not in bases.values() and not self._is_protected(step, path, linked):
                    delete = self._directory.remove(path, guard=guard)
                    if step in bases:  # A power cut must not bring it back without its base.
                        self._steps.store.settle(path)  # before the queue removes the directory
                        del bases[step]
                    self._deletion_queue.add(f"deleting {path}", delete)
            except MismatchError as error:
                _log.info("step %d stays: %s", step, error)
            except UnsupportedError as error:
                self._steps.mark_unsupported(step, path, error)
            except PermissionError as error:
                if path not in self._logged_denials:
                    self._logged_denials.add(path)
                    _log.error("step %d stays until this user may delete it: %s", step, error)
            except (OSError, CorruptError) as error:  # The other steps are deleted nevertheless.
                _log.error("deleting step %d failed; it is tried again after the next save: %s", step, error)

    def _steps_to_delete(
        self, saved: Sequence[Saved], committed: Mapping[int, str], wanted: Collection[int | None]
    ) -> dict[int, str]:
        """Returns the committed valid steps that are not wanted, and their paths."""
        return {one.step: committed[one.step] for one in saved if one.step in committed and one.step not in wanted}

    def _links_to_steps(self) -> dict[str, tuple[str, ...]]:
        return run_layout.find_links(self._steps.store, self._steps.root)

    def _is_protected(self, step: int, path: str, linked: Mapping[str, tuple[str, ...]]) -> bool:
        """Returns True if a step is pinned or a link, or if a link leads to it, which is logged once."""
        if pins.is_pinned(self._steps.store, path) or self._steps.store.is_link(path):
            return True
        leading = linked.get(posixpath.basename(path))
        if leading and path not in self._logged_links:
            self._logged_links.add(path)
            _log.warning("%s: step %d stays: %s to it", self._steps.root, step, run_layout.describe_links(leading))
        return leading is not None

    def _warn_without_metrics(self) -> None:
        """Logs, at the end of a job that was too short to log it before, that no step has metrics."""
        if self._keep and 0 < self._saves_without_metrics < _EVALUATED_WITHIN:
            self._saves_without_metrics = _EVALUATED_WITHIN
            with self._logging_errors():
                self._warn_of_unknown_metrics(self._list_steps()[0], self._keep.metrics)

    def _warn_of_unknown_metrics(self, saved: Sequence[Saved], metrics: set[str]) -> None:
        if not metrics or len(saved) < 2:  # The metrics of the first step may still be added.
            return
        known = frozenset(name for one in saved for name in one.metrics)
        self._saves_without_metrics += not known
        if not known and self._saves_without_metrics < _EVALUATED_WITHIN:
            return
        root, count = self._steps.root, len(saved)
        for metric in metrics - known:
            names, last = self._logged_metrics.get(metric, (frozenset(), 0))
            # The right name may come with the first evaluation, and steps without the metric fill the disk.
            if not last or names != known or count >= 2 * last:
                self._logged_metrics[metric] = known, count
                found = name_known(metric, known) or "no metrics"
                text = "%s: keep.best: none of the %d steps has the metric %r yet; they have %s"
                _log.warning(text, root, count, metric, found)
