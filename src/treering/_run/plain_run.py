"""A run in one directory: places, pins, deletes and archives its steps."""

import contextlib
import logging
import os
import posixpath
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from .._core.entries import step_number
from .._core.units import count
from ..errors import ExistsError, MismatchError, NotFoundError, SaveError, UnsupportedError
from ..formats import StepPath
from ..formats.treering import pins
from ..formats.treering.removal import check_removable
from ..keep import Saved
from . import new_run, removal, run_layout
from .step_catalog import StepCatalog
from .step_fallback import StepCopy, newest_first
from .tiers.journal import invalidate_local_tiers

T = TypeVar("T")
_log = logging.getLogger("treering")


class PlainRun:
    """The steps of a run in one directory; see `RunDirectory`.

    `busy` returns True while the lease of the run's one writer is needed.
    `on_delete` is called with the path of a step that is about to be deleted.
    """

    def __init__(self, steps: StepCatalog, busy: Callable[[], bool]):
        self.steps, self.root = steps, steps.root
        self.back_to: int | None = None
        self.restored_step: int | None = None
        self.on_delete: Callable[[str], None] = lambda path: None
        self._has_invalidated_local_tiers = self._has_warned_of_later = False
        self._starts_over = False  # True if this job has archived all steps
        self.has_held_lock = False  # True once this object has had the lease
        self.lease_seconds = 0.0
        self._holder_pid: int | None = None  # The process that has the lease: a forked child does not have it.
        self._lock = steps.store.lease(steps.root, busy)
        self._store, self._root, self._prefix = steps.store, steps.root, steps.prefix

    uploads = None  # There is one tier.

    def acquire_run(self) -> bool:
        """Acquires the lease. Returns True."""
        self._acquire_run()
        return True

    def readable_copies(self, step: int | None = None) -> Iterable[StepCopy]:
        """Returns the candidates that can be read."""
        return newest_first(self._store, self.located_steps()) if step is None else self.step_copies(step)

    @property
    def is_held(self) -> bool:
        """True if this process has the lease."""
        return self._holder_pid == os.getpid() and not self.lost

    @property
    def lost(self) -> bool:
        """True if another `Checkpointer` of this process has acquired the run."""
        return self._lock.lost

    def all_steps(self) -> run_layout.Steps[str]:
        """Returns the committed steps, ascending, and their paths, with those of other libraries."""
        return run_layout.all_steps(self._store, self._root, self._prefix, self.steps.layout.foreign_prefix)

    def newest_step(self) -> int | None:
        """Returns the newest of `all_steps`."""
        return self.all_steps().newest

    def located_steps(self) -> run_layout.Steps[StepPath] | dict[int, StepPath]:
        """Returns the same as `all_steps`, with the formats."""
        return run_layout.located_steps(
            self._store, self._root, self._prefix, foreign_prefix=self.steps.layout.foreign_prefix
        )

    def step_copies(self, step: int) -> list[StepCopy]:
        """Returns the copies of a step. Raises `NotFoundError` if there is no such step."""
        number = step_number(step)
        return [self.copy_at(number, *self._find(number, self.located_steps()))]

    def copy_at(self, step: int, path: str, format: str | None = None) -> StepCopy:
        """Returns the copy of a step at a path."""
        return StepCopy(step, self._store, path, format)

    def valid_steps(self, *, foreign: bool = False) -> Sequence[Saved]:
        """Returns the valid steps, ascending; with `foreign` also those of other libraries."""
        return self.steps.valid_steps(foreign=foreign)

    def mark_damaged(self, place: StepCopy) -> None:
        """Remembers that a copy of a step is damaged, until it is replaced."""
        self.steps.mark_damaged(place.step, place.path)

    def check_new(self, **local: bool) -> None:
        """Checks a directory without steps, and logs similar steps and runs; see `new_run`."""
        new_run.check_can_begin(self._store, self._root, self._prefix)
        if not self._starts_over:
            new_run.warn_of_other_runs(self._store, self._root, **local)

    def path(self, step: int) -> str:
        """Returns the directory of a step, even if it does not exist."""
        return self.all_steps().get(step) or self.step_path(step)

    def committed_path(self, step: int) -> str:
        """Returns the path of a committed step. Raises `NotFoundError` if there is none."""
        return self._find(step, self.all_steps())

    def pinned(self) -> list[int]:
        """Returns the pinned steps, ascending."""
        with self._store.glance(self._root):
            return [step for step, path in self.steps.committed().items() if pins.is_pinned(self._store, path)]

    def pin(self, step: int, wanted: bool) -> None:
        """Marks a step never to be deleted, or removes the mark."""
        pins.pin(self._store, self._own_step_path(step), wanted)

    def delete(self, step: int) -> None:
        """Deletes a step. Raises what `check_unpinned_and_unlinked` does.

        Raises `UnsupportedError` for a step of a later release.
        """
        path = self._own_step_path(step)
        self.check_unpinned_and_unlinked(path)
        if made := [one.step for one in self.steps.valid_steps() if one.base == step]:
            raise MismatchError(
                f"{path}: expected a step that no other needs, but step {made[0]} is stored as the difference to it; "
                f"delete step {made[0]} first"
            )
        self.remove(path)()

    def remove(self, path: str, *, pinned: bool = False, guard: Callable[[], None] | None = None) -> Callable[[], bool]:
        """Removes the step at a listed path, to which no link may lead. With `pinned`, ignores a pin."""
        prepare = lambda: self.prepare_removal(path, pinned=pinned)  # noqa: E731
        return removal.remove(self._store, path, self.steps.layout, prepare, guard)

    def check_unpinned_and_unlinked(self, path: str, *, pinned: bool = False) -> None:
        """Raises `MismatchError` if a step is pinned or a link, or if a link in the run leads to it."""
        self._check_unpinned(path, pinned)
        run_layout.check_not_linked(self._store, path)

    def prepare_removal(self, path: str, *, pinned: bool = False) -> None:
        """Notes that a step is about to be deleted. Raises `MismatchError` if it was pinned meanwhile."""
        self._check_unpinned(path, pinned)
        self.on_delete(path)

    def _check_unpinned(self, path: str, pinned: bool) -> None:
        if not pinned:
            pins.check_unpinned(self._store, path)
        if self._store.is_link(path):
            raise MismatchError(f"{path}: expected a directory of this run, found a link; remove the link yourself")

    def reserve_step(
        self, step: int, on_exists: str, pending_steps: Collection[int | None], elsewhere: Collection[int] = ()
    ) -> tuple[str, bool] | None:
        """Returns the path to save a step to, and True to overwrite it; None to skip the step. Raises `ExistsError`.

        An existing step may belong to another job that writes the run. The error then names that job, whatever
        `on_exists` says. `elsewhere`: steps that the run's other tier has.
        """
        committed = self.steps.lookup()
        back_to = run_layout.MAX_STEP if self.back_to is None else self.back_to
        if self.back_to is not None:
            self.check_movable_after(back_to)
        is_there = step <= back_to and step in committed
        if not (self._has_warned_of_later or is_there or step in elsewhere):
            own = (one for one in committed.after(step) if one <= back_to)
            self._warn_of_later(step, sorted({*own, *(one for one in elsewhere if one > step)}))
        path = committed[step] if is_there else self.step_path(step)
        overwrite = on_exists == "overwrite"
        if step in pending_steps or is_there:
            self._lock.check_free()
            overwrite = overwrite or (is_there and self.steps.is_damaged(step, path))
            if overwrite and pins.is_pinned(self._store, path):
                raise ExistsError(f"{path}: step {step} is pinned; unpin it before it is overwritten")
            if not overwrite and on_exists == "skip":
                return None
            if not overwrite:
                raise ExistsError(
                    f"{path}: step {step} is saved already; pass on_exists='skip' or 'overwrite', "
                    "or continue from ckpts.latest_step"
                )
            if is_there:
                self._check_removable({step: path})
        return path, overwrite

    def _warn_of_later(self, step: int, later: list[int]) -> None:
        """Logs, once, that a new step is not going to be the latest of the run."""
        while later and self.steps.is_damaged(later[-1], self.step_path(later[-1])):
            later.pop()
        if later:
            self._has_warned_of_later = True
            _log.warning(
                "%s: saving step %d after step %d, which stays the latest: restore takes it, and `keep` counts "
                "from it; to continue from an earlier step, restore it with step= or rewind to it; to start over call "
                "rewind(None), which archives all steps",
                self._root, step, later[-1],
            )  # fmt: skip

    def acquire(self) -> None:
        """Acquires the lease. Raises `ExistsError` if another writer has it."""
        holder, begun = os.getpid(), time.perf_counter()
        if self._holder_pid != holder:  # Another writer may have changed the run.
            self.steps.look_again()
        self._lock.acquire()
        self.lease_seconds += time.perf_counter() - begun
        self._holder_pid, self.has_held_lock = holder, True

    def release(self) -> None:
        """Releases the lease."""
        self._holder_pid = None
        self._lock.release()

    def acquire_for_save(self) -> None:
        """Acquires the lease for a save, and archives the steps after `back_to`. Raises `ExistsError`."""
        self._acquire_run()
        if self.back_to is not None:
            self.archive_after(self.back_to)

    def _acquire_run(self) -> None:
        """Acquires the lease, and invalidates the local tier of an earlier job."""
        self.acquire()
        if not self._has_invalidated_local_tiers:
            invalidate_local_tiers(self._store, self._root)
            self._has_invalidated_local_tiers = True

    def clear_finished(self) -> None:
        """Notes that the run continues: removes the mark of a finished run."""
        self.unmark_finished()

    def unmark_finished(self) -> None:
        """Removes the mark of a finished run."""
        with contextlib.suppress(FileNotFoundError):
            self._store.delete(posixpath.join(self._root, run_layout.FINISHED_MARK))

    def mark_finished(self) -> None:
        """Marks the run as finished. The caller has the lease."""
        run_layout.mark_finished(self._store, self._root)

    def before_write(self, retain: Callable[[int | None], None]) -> bool:
        """Prepares a save before anything is written. `retain` deletes old steps in the background.

        Returns True if the save should wait until they are deleted.
        """
        return False

    def on_commit(self, step: int | None, retain: Callable[[int | None], None]) -> None:
        """Follows the commit of a step: calls `retain`, which deletes old steps except this one."""
        retain(step)

    def protected_steps(self) -> set[int]:
        """Returns the steps that retention must not delete, whatever the policy says."""
        return set() if self.restored_step is None else {self.restored_step}

    def end_writing(self) -> SaveError | None:
        """Ends the writing once all background jobs are done. Returns the error of a failed upload, or None."""
        self.release()

    def steps_to_archive(self, step: int) -> list[int]:
        """Returns the steps that `rewind` would archive, ascending. Acquires no lease. Raises what `rewind` raises."""
        if step > 0:
            self.committed_path(step)
        self.check_movable_after(step)
        return list(self.steps.lookup().after(step))

    def rewind(self, step: int, *, log_level: int = logging.WARNING) -> None:
        """Archives the steps after a step, or all: with 0, if step 0 is not saved, or with `BEFORE_FIRST_STEP`.

        log_level: lower if the caller says what was archived.

        Raises `NotFoundError` if there is no such step, and `UnsupportedError` if a later one is another library's.
        """
        self.steps_to_archive(step)
        self._acquire_run()
        self.archive_after(step, log_level)

    def finish(self) -> None:
        """Marks the run as finished."""
        self._acquire_run()
        self.mark_finished()

    def archive_after(self, step: int, log_level: int = logging.WARNING) -> None:
        """Archives the steps after a number. The caller has the lease."""
        run_layout.sync_archived(self._store, self._root)
        later = self.steps.lookup().after(step)
        self._check_removable(later)  # Checked again: no other process can write the run now.
        if later:
            place = run_layout.archive_steps(self._store, self._root, list(reversed(later.values())))
            self._starts_over = not self.steps.lookup()
            where = "the run starts over" if self._starts_over else f"continuing from step {step}"
            _log.log(log_level, "%s; %s archived in %s", where, count(len(later), "later step"), place)

    def check_movable_after(self, step: int) -> None:
        """Raises `UnsupportedError` if steps after a number cannot be moved."""
        own = self.steps.lookup().after(step)
        foreign = [path for number, path in self.all_steps().after(step).items() if number not in own]
        if foreign:
            after = f"step {step}" if step >= 0 else "the beginning"
            raise UnsupportedError(
                f"{foreign[0]}: after {after}, and written by another library, so it is not moved; move it out "
                "of the run yourself, or use another directory"
            )
        self._check_removable(own)

    def _check_removable(self, steps: Mapping[int, str]) -> None:
        """Raises `UnsupportedError` for steps of a later release."""
        for step, path in steps.items():
            try:
                check_removable(self._store, path)
            except UnsupportedError as error:
                raise UnsupportedError(
                    f"step {step} is neither moved nor replaced; use another directory: {error}"
                ) from None

    def check_own_step(self, step: int) -> None:
        """Raises `NotFoundError` if a step does not exist, or is another library's."""
        self._own_step_path(step)

    def _own_step_path(self, step: int) -> str:
        own, number = self.steps.lookup(), step_number(step)
        others = {} if number in own else self.located_steps()
        if number in others:
            raise NotFoundError(
                f"{others[number].path}: expected a step in the native format, found one that another library wrote; "
                "Treering never deletes it, so it needs no pin; delete its folder yourself, or `treering convert` it"
            )
        if others and not own:
            found = ", ".join(map(str, list(others)[-5:]))
            raise NotFoundError(f"{self._root}: expected step {number}, found only steps of another library: {found}")
        return self._find(number, own)

    def step_path(self, step: int) -> str:
        """Returns the directory in which Treering saves a step."""
        return posixpath.join(self._root, self.steps.layout.step_name(step))

    def _find(self, step: int, committed: Mapping[int, T]) -> T:
        if (number := step_number(step)) not in committed:
            run_layout.check_step_readable(self._store, self.step_path(number), NotFoundError)
            shown = ("… " if len(committed) > 5 else "") + (", ".join(map(str, list(committed)[-5:])) or "no steps")
            meant = "" if committed else new_run.suggest_run(self._store, self._root)
            raise NotFoundError(f"{self._root}: expected step {number}, found {shown}{meant}")
        return committed[number]
