"""The work around the saves of a run: leftovers, retention, reports."""

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
    """The `SaveHooks` of a run. No error after a commit fails the save."""

    def __init__(
        self,
        directory: "Directory | TwoPlaces",
        keep: Policy | None,
        on_save: Callable[[SaveReport], object] | None = None,
        committed: Callable[[SaveReport], None] = lambda report: None,
    ):
        self._directory, self._steps = directory, directory.steps
        self._keep, self._on_save, self._committed = keep, on_save, committed
        self._problem: SaveError | None = None  # in leaving the run
        self._has_saved = False  # this job has, or copied, a step here
        self._cleaned = False
        self._failed = False  # the last save, as far as it is not committed
        self._unknown: set[str] = set()  # metrics that no step had, and that are logged already
        self._linked: set[str] = set()  # steps that stay because links lead to them, and that are logged already
        # Each in its own thread: a slow hook keeps no old step on the disk, and a save may wait for deletions alone.
        self._deletions, self._hooks, self._leaving = Chores(), Chores(), Chores()

    def enter(self) -> None:
        """Takes the lock of the run. Raises `ExistsError` when another writer holds it."""
        self._directory.enter()

    def before(self) -> None:
        """Before a save. Before the first one, removes the leftovers of killed jobs, and the mark of a finished run."""
        needs_room = self._directory.about_to_save(self.retain)
        if needs_room or self._failed:  # for lack of that room, it may be
            self._deletions.wait()
        self._failed = True
        if self._cleaned:
            return
        try:
            self._directory.begin()
            self._remove_leftovers()
            self._cleaned = True
        except OSError:
            _log.exception("removing what earlier jobs left behind failed; it is tried again with the next save")

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
                    if not store.is_link(step := posixpath.join(place, name)):  # what a link leads to is no run's
                        removal.remove_leftovers(store, step, remove_empty=True)
                elif not store.has_locks and clock_of(name) == LOCK_NAME:  # of a killed writer
                    with contextlib.suppress(FileNotFoundError):
                        store.delete(posixpath.join(place, name))
        run.settle_aside(store, root)

    def after(self, report: SaveReport) -> None:
        """After a commit: deletes the steps that the policy does not keep, and calls `on_save` in another thread."""
        self._failed = False
        self._directory.committed(report.step, self.retain)
        self._committed(report)
        if on_save := self._on_save:
            self._hooks.add("on_save", lambda: on_save(report))

    def after_in_all(self, report: SaveReport) -> None:
        """The same in all processes."""
        if report.step is not None and (together := self._directory.together):
            together.saved(report.step)

    def close(self) -> None:
        """Releases the lock of the run when all jobs are done, and returns then; after an interrupt they go on.

        Raises `SaveError` when steps are not where they should be.
        """
        self._leave()
        self._leaving.wait()
        if problem := self._problem:
            self._problem = None
            raise problem

    def wait(self) -> None:
        """Returns when the deletions so far are done."""
        self._deletions.wait()

    def close_after(self, last: PendingSave) -> None:
        """Releases the lock of the run in the background, when the save `last` is over and all jobs are done."""

        self._leaving.add("waiting for the last save", last._wait)
        self._leave()

    def _leave(self) -> None:
        """Queues the release of the run's lock behind all jobs."""

        def leave() -> None:
            self._hooks.wait()
            if self._directory.held:  # metrics may have come since the last save, some from the hooks
                self.retain_late()
            self._deletions.wait()
            self._problem = self._directory.leave()

        self._leaving.add("leaving the run", leave)

    def retain(self, *needed: int | None) -> None:
        """Deletes the steps that the policy does not keep, except `needed`, as one just saved. Errors are logged."""
        with self._logged():
            self._retain(needed)

    def retain_late(self, check: Callable[[], None] = lambda: None) -> None:
        """Does the same, if any metric that the policy asks for came after the save of its step.

        `check` is called right before a step goes, and raises `MismatchError` if it must not. After going back to an
        earlier step, nothing changes until the next save.
        """
        with self._logged():
            if self._directory.back_to is None and self.has_late():
                self._retain((), check)

    def has_late(self, needed: Collection[int | None] = ()) -> bool:
        """Returns True if a metric that the policy asks for came late, and a step has to go."""
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
        except Exception:  # a policy may be the user's code, and the checkpoint is committed
            _log.exception("deleting old steps failed; it is tried again after the next save")

    def _look(self) -> tuple[Sequence[SavedStep], dict[int, str]]:
        """Returns the good steps, and the paths of the committed ones."""
        with self._steps.store.glance(self._steps.root):
            return self._steps.good(), self._steps.committed()

    @property
    def knows_good_step(self) -> bool:
        """Whether this job has saved, copied or restored a step here: the newest found at its start may be damaged."""
        return self._has_saved or bool(self._directory.needed())

    def _wanted(self, keep: Policy, saved: Sequence[Saved], needed: Collection[int | None]) -> set[int | None]:
        """Returns the steps that stay, whether they are there or not."""
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
            except (OSError, CorruptError) as error:  # the other steps are deleted all the same
                _log.error("deleting step %d failed; it is tried again after the next save: %s", step, error)

    def _unwanted(
        self, saved: Sequence[Saved], committed: Mapping[int, str], wanted: Collection[int | None]
    ) -> dict[int, str]:
        """Returns the committed steps that nobody wants, and their paths."""
        return {one.step: committed[one.step] for one in saved if one.step in committed and one.step not in wanted}

    def _links(self) -> dict[str, tuple[str, ...]]:
        return links.to_steps(self._steps.store, self._steps.root)

    def _stays(self, step: int, path: str, linked: Mapping[str, tuple[str, ...]]) -> bool:
        """Returns True for a step that is pinned, is a link, or that a link leads to, which is logged once."""
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
        if len(saved) < 2:  # the metrics of the first step may be added later
            return
        known = sorted({name for one in saved for name in one.metrics})
        for metric in metrics.difference(known, self._unknown):
            near = closest(metric, known)
            hint = f"they have {few(tuple(known))}" if known else "they have no metrics"
            hint += f"; the closest name is {near}" if near else ""
            root, count = self._steps.root, len(saved)
            _log.warning("%s: keep.best: none of the %d steps has the metric %r yet; %s", root, count, metric, hint)
            self._unknown.add(metric)
