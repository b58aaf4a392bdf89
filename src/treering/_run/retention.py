"""Retention: deletes the steps that the policy does not keep, and the leftovers of killed jobs."""

import contextlib
import logging
import posixpath
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from .._core.leaf_paths import closest, few
from .._save.pending import PendingSave, SaveReport
from ..errors import CorruptError, MismatchError, SaveError, UnsupportedError
from ..formats.treering import pins, removal
from ..keep import Policy, Saved
from ..stores.claims import TakenOverError
from ..stores.store import LOCK_NAME
from ..stores.temporary_names import clock_of, place_of
from . import links, run
from .chores import Chores
from .directory import Directory
from .steps import SavedStep

if TYPE_CHECKING:
    from .two_places import TwoPlaces

_log = logging.getLogger("treering")


class Retention:
    """The `SaveHooks` of a run. An error after the commit is logged and does not fail the save."""

    def __init__(
        self,
        directory: "Directory | TwoPlaces",
        keep: Policy | None,
        on_save: Callable[[SaveReport], object] | None = None,
        committed: Callable[[SaveReport], None] = lambda report: None,
    ):
        self._directory, self._steps = directory, directory.steps
        self._keep, self._on_save, self._committed = keep, on_save, committed
        self._problem: SaveError | None = None  # the error of leaving the run
        self._has_saved = False  # True once this job has saved or uploaded a step here
        self._cleaned = False
        self._failed = False  # True from the beginning of a save until its commit
        self._unknown: set[str] = set()  # metrics that no step had, already logged
        self._linked: set[str] = set()  # steps that stay because links lead to them, already logged
        # Three queues: a slow hook must not delay deletions, and a save may have to wait for the deletions alone.
        self._deletions, self._hooks, self._leaving = Chores(), Chores(), Chores()

    def enter(self) -> None:
        """Acquires the lease of the run. Raises `ExistsError` if another writer has it."""
        self._directory.enter()

    def before(self) -> None:
        """Prepares a save. Before the first one, removes leftovers of killed jobs and the mark of a finished run."""
        needs_room = self._directory.about_to_save(self.retain)
        if needs_room or self._failed:  # The last save may have failed because the disk was full.
            self._deletions.wait()
        self._failed = True
        if self._cleaned:
            return
        try:
            self._directory.begin()
            self._remove_leftovers()
            self._cleaned = True
        except OSError:
            _log.exception("removing leftovers of earlier jobs failed; the next save tries again")

    def remove_leftovers(self) -> None:
        """Removes the leftovers of killed jobs, once."""
        if not self._cleaned:
            self._remove_leftovers()
            self._cleaned = True

    def _remove_leftovers(self) -> None:
        store, root = self._steps.store, self._steps.root
        for place in (root, *run.aside(store, root)):
            for name in store.list(place):
                beside = place_of(name)
                if beside and run.parse(beside, self._steps.prefix) is not None:
                    with contextlib.suppress(FileNotFoundError):
                        store.remove_leftover(posixpath.join(place, name))
                if run.parse(name, self._steps.prefix) is not None:
                    if not store.is_link(step := posixpath.join(place, name)):  # a link is not part of the run
                        removal.remove_leftovers(store, step, remove_empty=True)
                elif not store.has_locks and clock_of(name) == LOCK_NAME:  # a killed writer's
                    with contextlib.suppress(FileNotFoundError):
                        store.delete(posixpath.join(place, name))
        run.settle_aside(store, root)

    def after(self, report: SaveReport) -> None:
        """Follows a commit: deletes the steps that the policy does not keep, and calls `on_save` in another thread."""
        self._failed = False
        self._directory.committed(report.step, self.retain)
        self._committed(report)
        if on_save := self._on_save:
            self._hooks.add("on_save", lambda: on_save(report))

    def after_in_all(self, report: SaveReport) -> None:
        """Follows a commit in all processes: begins an upload if each host has its own disk."""
        if report.step is not None and (together := self._directory.together):
            together.saved(report.step)

    def close(self) -> None:
        """Waits for all background jobs, and releases the lease of the run. After an interrupt this continues.

        Raises `SaveError` if steps could not be uploaded.
        """
        self._leave()
        self._leaving.wait()
        if problem := self._problem:
            self._problem = None
            raise problem

    def wait(self) -> None:
        """Waits for the deletions that were queued so far."""
        self._deletions.wait()

    def close_after(self, last: PendingSave) -> None:
        """Releases the lease of the run in the background, once the save `last` and all background jobs are over."""

        self._leaving.add("waiting for the last save", last._wait)
        self._leave()

    def _leave(self) -> None:
        """Queues the release of the run's lease after all jobs."""

        def leave() -> None:
            self._hooks.wait()
            if self._directory.held:  # Metrics may have come since the last save, also from hooks.
                self.retain_late()
            self._deletions.wait()
            self._problem = self._directory.leave()

        self._leaving.add("leaving the run", leave)

    def retain(self, *needed: int | None) -> None:
        """Deletes the steps that the policy does not keep, except `needed`, such as the new step. Logs errors."""
        with self._logged():
            self._retain(needed)

    def retain_late(self, check: Callable[[], None] = lambda: None) -> None:
        """Deletes these steps only if a metric that the policy uses came after the save of its step.

        `check` is called right before a step is deleted, and raises `MismatchError` if it must stay. After a restore
        of an earlier step, nothing changes until the next save.
        """
        with self._logged():
            if self._directory.back_to is None and self.has_late():
                self._retain((), check)

    def has_late(self, needed: Collection[int | None] = ()) -> bool:
        """Returns True if a metric that the policy uses came late, and a step has to be deleted."""
        if self._keep is None or not self._keep.metrics:
            return False
        saved, committed = self._look()
        if not any(self._keep.metrics & one.late for one in saved):
            return False
        unwanted = self._unwanted(saved, committed, self._wanted(self._keep, saved, needed))
        linked = self._links() if unwanted else {}
        return any(not self._stays(step, path, linked) for step, path in unwanted.items())

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        try:
            yield
        except TakenOverError as error:
            _log.error("%s: old steps are not deleted: %s", self._steps.root, error)
        except Exception:  # A policy may be the user's code, and the step is committed.
            _log.exception("deleting old steps failed; it is tried again after the next save")

    def _look(self) -> tuple[Sequence[SavedStep], dict[int, str]]:
        """Returns the valid steps, and the paths of the committed ones."""
        with self._steps.store.glance(self._steps.root):
            return self._steps.good(), self._steps.committed()

    @property
    def knows_good_step(self) -> bool:
        """True if this job has saved, uploaded or restored a step here. The newest step at its start may be damaged."""
        return self._has_saved or bool(self._directory.needed())

    def _wanted(self, keep: Policy, saved: Sequence[Saved], needed: Collection[int | None]) -> set[int | None]:
        """Returns the steps that stay. Some of them may not exist."""
        return {*keep.kept(saved), *self._directory.needed(), *needed, *(one.step for one in saved[-1:])}

    def _retain(self, needed: Collection[int | None], check: Callable[[], None] = lambda: None) -> None:
        if self._keep is None:
            return
        self._has_saved = self._has_saved or any(step is not None for step in needed)
        saved, committed = self._look()
        self._name_unknown_metrics(saved, self._keep.metrics)
        unwanted = self._unwanted(saved, committed, self._wanted(self._keep, saved, needed))
        linked = self._links() if unwanted else {}
        for step, path in unwanted.items():
            try:
                if not self._stays(step, path, linked):
                    self._delete(path, check)
            except MismatchError as error:
                _log.info("step %d stays: %s", step, error)
            except UnsupportedError as error:
                self._steps.mark_unsupported(step, path, error)
            except (OSError, CorruptError) as error:  # The other steps are deleted nevertheless.
                _log.error("deleting step %d failed; it is tried again after the next save: %s", step, error)

    def _unwanted(
        self, saved: Sequence[Saved], committed: Mapping[int, str], wanted: Collection[int | None]
    ) -> dict[int, str]:
        """Returns the committed valid steps that are not wanted, and their paths."""
        return {one.step: committed[one.step] for one in saved if one.step in committed and one.step not in wanted}

    def _links(self) -> dict[str, tuple[str, ...]]:
        return links.to_steps(self._steps.store, self._steps.root)

    def _stays(self, step: int, path: str, linked: Mapping[str, tuple[str, ...]]) -> bool:
        """Returns True if a step is pinned or a link, or if a link leads to it, which is logged once."""
        if pins.pinned(self._steps.store, path) or self._steps.store.is_link(path):
            return True
        leading = linked.get(posixpath.basename(path))
        if leading and path not in self._linked:
            self._linked.add(path)
            _log.warning("%s: step %d stays: %s to it", self._steps.root, step, links.described(leading))
        return leading is not None

    def _delete(self, path: str, check: Callable[[], None]) -> None:
        def check_deletable() -> None:
            self._directory.check_deletable(path)
            check()

        delete = removal.unpublish(self._steps.store, path, check_deletable)
        self._deletions.add(f"deleting {path}", delete)

    def _name_unknown_metrics(self, saved: Sequence[Saved], metrics: set[str]) -> None:
        if len(saved) < 2:  # The metrics of the first step may still be added.
            return
        known = sorted({name for one in saved for name in one.metrics})
        for metric in metrics.difference(known, self._unknown):
            near = closest(metric, known)
            hint = f"they have {few(tuple(known))}" if known else "they have no metrics"
            hint += f"; the closest name is {near}" if near else ""
            root, count = self._steps.root, len(saved)
            _log.warning("%s: keep.best: none of the %d steps has the metric %r yet; %s", root, count, metric, hint)
            self._unknown.add(metric)
