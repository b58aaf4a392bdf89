"""A run that is saved on a local disk and copied from there to where it stays."""

import logging
import os
import posixpath
from collections.abc import Callable, Collection, Sequence

from .._core.entries import step_number
from .._processes.calls import Call
from ..errors import CorruptError, ExistsError, SaveError
from ..formats.treering import copy, host_parts, metrics, pins, removal, summary
from ..keep import Policy, Saved
from . import deleted, run
from .copies import Copies
from .directory import Directory
from .host_disks import steps_in_part
from .near_and_far import NearAndFar
from .retention import Retention
from .together import Together

_log = logging.getLogger("treering")


class TwoPlaces(NearAndFar):
    """Saves steps near and copies them; the next save sets aside what is near and not of the run any more."""

    def __init__(
        self,
        near: Directory,
        far: Directory,
        keep: Policy | None,
        bytes_per_second: float | None,
        tell: Callable[[BaseException], None],
        timeout: float,
    ):
        super().__init__(near, far)
        self._keep = keep
        self._process = os.getpid()
        self._seen_far: Sequence[Saved] = []  # when it was last looked
        self._ended = False
        self._dropped: dict[int, str] = {}  # steps that the policy has deleted far, and their identities
        near.before_delete, far.before_delete = self._note_deleted, self._drop
        self._retain: Callable[[int | None], None] = lambda step: None
        self._ever_far: set[int] = set()  # no other step is there: saving one needs no look at it
        self.far_retention = Retention(far, keep)
        self._copies = Copies(self, self.far_retention, bytes_per_second, tell, timeout)
        self.together: Together | None = None

    @property
    def claimed(self) -> bool:
        """Whether this process holds both locks, and what is near belongs to the run."""
        return self._claimed and not self.lost and os.getpid() == self._process

    held = False  # its two directories have locks of their own

    def begin_copying(self) -> None:
        """Copies what is lacking in the background, and deletes what the policy does not want."""
        self._copies.begin()

    @property
    def copying(self) -> int | None:
        return self._copies.step

    @property
    def busy(self) -> bool:
        return self._copies.busy

    def meet(self, call: Call) -> None:
        super().meet(call)
        if self.disks:
            self.together = Together(self, self.disks, self._copies)

    # Writing

    def _claim(self) -> None:
        """Takes both locks, and sets aside what does not belong to the run."""
        self.near.acquire()
        if self._claimed:
            if self.far.lost:
                self.far.acquire()  # which says so
            self._copies.check()
            self.origin.keep_near()
            return
        self.far.acquire()
        self._set_aside(self._of_no_use())
        self._forget_copied_parts()
        self.origin.set_near(apart=self.disks is not None)
        self._ever_far.update(self.far.steps.committed())
        self._claimed = True
        self._copies.begin()

    def _of_no_use(self) -> dict[int, str]:
        """The steps near that do not count, and are not far, and their paths."""
        near = self.near.steps.committed()
        found = {**near, **steps_in_part(self.near.steps)}
        if self.origin.is_newest():
            lacking = self.disks.lacking if self.disks else set()
            if not self.disks and self.origin.was_apart():  # other hosts have the rest, and are not in this job
                lacking = {step for step, path in found.items() if not host_parts.is_whole(self.near.steps.store, path)}
            found = {step: path for step, path in found.items() if step in lacking or step not in near}
        far = self.far.steps.committed() if found else {}
        return {step: path for step, path in found.items() if step not in far or not self._may_be(path, far[step])}

    def _may_be(self, path: str, other: str) -> bool:
        """Whether what is near may be, or be a part of, the step far and no other; a damaged manifest may be that."""
        return host_parts.identities(self.near.steps.store, path) <= host_parts.identities(self.far.steps.store, other)

    def _forget_copied_parts(self) -> None:
        """Forgets the parts of steps whose manifest is not here, and which are whole far: nothing asks for them."""
        if parts := steps_in_part(self.near.steps):
            near, far = self.near.steps.committed(), self.far.steps.committed()
            whole = {one.step for one in self.far.good()}
            for step, path in parts.items():
                if step in whole and step not in near and self._may_be(path, far[step]):
                    host_parts.forget(self.near.steps.store, path)

    def _set_aside(self, others: dict[int, str]) -> None:
        if others:
            newest_first = [others[step] for step in sorted(others, reverse=True)]
            if self.disks:
                near = self.near.steps.store
                self.disks.aside.update(*(host_parts.identities(near, path) for path in newest_first))
            place = run.set_aside(self.near.steps.store, self.near.root, newest_first)
            _log.warning("%s: what does not count was set aside to %s", self.near.root, place)
        if self.disks:
            self.disks.lacking.clear()

    def place_for(self, step: int, on_exists: str, under_way: Collection[int | None]) -> tuple[str, bool] | None:
        self._claim()
        if self.back_to is not None:
            self.far.check_own_after(self.back_to)
        if step in self._ever_far and self.far.place_for(step, on_exists, under_way) is None:
            return None
        far = () if self.back_to is not None else self._ever_far
        whole = [one for one in far if not (one > step and self.far.steps.is_damaged(one, self.far.own_path(one)))]
        found = self.near.place_for(step, on_exists, under_way, whole)
        if self.disks and found and found[1]:  # other hosts may still have parts of what is replaced when that is gone
            self.disks.known |= host_parts.identities(self.near.steps.store, found[0])
        return found

    def enter(self) -> None:
        self._claim()
        if self.back_to is not None:
            self._set_aside_after(self.back_to)

    def begin(self) -> None:
        for one in (self.near, self.far):
            one.unmark_finished()

    def about_to_save(self, retain: Callable[[int | None], None]) -> bool:
        self._retain = retain
        retain(None)  # here, where no save is under way; what was copied since the last one goes
        return True  # a local disk may have room for no more

    def committed(self, step: int | None, retain: Callable[[int | None], None]) -> None:
        if step is not None:
            self._saved.add(step)
            self._copied.pop(step, None)
        self._ended = False
        self._copies.begin()

    def needed(self) -> set[int]:
        """What is not known to be far stays; if the policy wants it, as far as that is known here."""
        good = self.near.good()
        wanted = {one.step for one in good if self._keep is None or one is good[-1]}
        if self._keep is not None:  # newer ones may be far alone
            both = {one.step: one for one in [*self._seen_far, *good]}
            wanted |= self._keep.kept([both[step] for step in sorted(both)])
        self._saved -= {one.step for one in good} - wanted  # they may go, and need no copy
        return {*self.near.needed(), *wanted.intersection(self._not_known_to_be_far(self._known_near()))}

    def retain(self) -> None:
        """Deletes old steps near, as after a save."""
        self._retain(None)

    def leave(self) -> SaveError | None:
        if self.index:
            self._copies.lift_limit()
            self._copies.wait()  # for what process 0 leads, and is over there
        own = self._claimed and os.getpid() == self._process and not self._ended
        problem = self._problem(self._copies.finish() if self.claimed else self._copies.taken_over) if own else None
        self._claimed = False
        for one in (self.far, self.near):
            try:
                one.leave()
            except BaseException:  # the other is left all the same, and what was not copied is said
                _log.exception("%s: its lock was not given back", one.root)
        return problem

    def pin(self, step: int, wanted: bool) -> None:
        places = self.candidates(step)
        if places[0].path in self.near_steps().values():  # first: a copy that ends meanwhile takes it over
            pins.pin(self.near.steps.store, places[0].path, wanted)
        if path := self.far.steps.committed().get(step_number(step)):
            pins.pin(self.far.steps.store, path, wanted)

    def delete(self, step: int) -> None:
        with self._copies.paused():
            self._seen_far = []
            places = self.candidates(step)
            for place in places:
                self._side(place.path).check_may_go(place.path)
            for place in places:  # near first: what is only near would be copied
                self._side(place.path).delete(step)
            self._saved.discard(step_number(step))
            self._ever_far.discard(step_number(step))

    def rewind(self, step: int) -> None:
        if step > 0:
            self.existing(step)
        self._claim()
        self._set_aside_after(step)

    def _set_aside_after(self, step: int) -> None:
        with self._copies.paused():
            self._seen_far = []
            for one in (self.near, self.far):
                one.check_own_after(step)
            self.near.set_aside_after(step)
            self.origin.set_far()
            self.far.set_aside_after(step)
            self._saved = {one for one in self._saved if one <= step}
            self._ever_far = {one for one in self._ever_far if one <= step}

    def finish(self) -> None:
        self._claim()
        self.copy_all()
        self.origin.set_far()
        for one in (self.near, self.far):
            one.mark_finished()

    # Copying

    def claim_for_copying(self) -> bool:
        """Takes the locks if there is something to copy, unless this job has only looked."""
        if not self._claimed and self.restored is not None and self.uncopied():
            self.claim_if_free()
        return self._claimed

    def claim_if_free(self) -> bool:
        """Takes the locks, unless another job writes the run, which is logged; returns whether this one has them."""
        try:
            return self._claimed or self.claim()
        except ExistsError as error:
            _log.warning("%s: steps are not copied from %s: %s", self.root, self.near.root, error)
            return False

    def claim(self) -> bool:
        """Takes the locks."""
        self._claim()
        return True

    def copy_all(self) -> None:
        """Waits until all is copied that this job has saved, or a job before it. Raises `SaveError`."""
        if os.getpid() != self._process:
            return
        if self.claim_for_copying():
            self._ended = True  # `leave` need not try again
            error = self._copies.finish() if self.claimed else self._copies.taken_over
            self._retain(None)
            if problem := self._problem(error):
                raise problem

    def _problem(self, error: BaseException | None) -> SaveError | None:
        """What is not far when copying has ended, and why."""
        near = self.near.steps.committed()
        lacking = self._saved.union(self.to_copy() if self.claimed and not error else self.uncopied())
        gone = sorted(step for step in lacking if step not in near or self.near.steps.is_damaged(step, near[step]))
        if error is None and not gone and (self.claimed or not lacking):
            return None
        there = ", ".join(str(step) for step in sorted(lacking) if step not in gone)
        parts = [f"{self.root}: not all steps are there, for copying them failed"]
        parts += ["another job has taken the run over, or another Checkpointer of this process"] if self.lost else []
        parts += [str(error)] if error else []
        parts += (
            [f"steps {there} are in {self.near.root}, and the next job that saves from there copies them"]
            if there
            else []
        )
        parts += [f"steps {', '.join(map(str, gone))} are damaged in {self.near.root}, or gone"] if gone else []
        problem = SaveError("; ".join(parts))
        problem.__cause__ = error
        return problem

    def to_copy(self) -> list[int]:
        """The good steps that are not far, or not whole there, and that the policy wants, the newest first."""
        near, far = self.near.steps.committed(), self.far.steps.committed()
        self._seen_far = self.far.good()
        whole = {one.step for one in self._seen_far}
        good = [one.step for one in self.near.good() if one.step in near]

        def lacks(step: int) -> bool:
            if step not in far and step in self._dropped and self._known_copied(step, near[step]):
                return self._dropped[step] != self._copied[step][1] or pins.pinned(self.near.steps.store, near[step])
            return step not in whole or not self.is_copied(step, near[step], far.get(step))

        lacking = [step for step in good if lacks(step)]
        if lacking and self._keep:
            both = self.good()
            wanted = self._keep.kept(both) | {both[-1].step}
            wanted.update(step for step in lacking if pins.pinned(self.near.steps.store, near[step]))
            self._saved.difference_update(set(lacking) - wanted)
            lacking = [step for step in lacking if step in wanted]
        return lacking[::-1]

    def copy(self, step: int, moved: Callable[[int], None]) -> bool:
        """Copies a step. Returns whether it was not there."""
        near, far = self.near.steps.store, self.far.steps.store
        self.origin.set_far()
        self._ever_far.add(step)
        there = self.far.steps.committed().get(step)
        path, to = self.near.own_path(step), there or self.far.own_path(step)
        if there and not self.far.steps.is_damaged(step, there) and self.is_copied(step, path, there):
            return False  # an answer was lost when it was looked for; a copy onto itself would remove its files
        others = self.disks and self.disks.copying(path, to)
        try:
            if there and self.far.steps.is_damaged(step, there):
                copy.check(near, path, others)  # or what is left far may be better
                self._copied.pop(step, None)  # from here on what is near is the only copy
                removal.delete(far, there)  # the names of its files may be those of the copy
            seen = summary.look(near, path)
            overwrite = summary.look(far, to) is not None
            identity = copy.copy(near, path, far, to, overwrite=overwrite, moved=moved, others=others)
        except CorruptError:
            if others:  # what is damaged there no restore finds out: it would read the copy
                self.near.steps.mark_damaged(step, path)
            raise
        if seen:
            self._note_copied(step, seen.version, identity)
        return True

    def check_deletable(self, path: str) -> None:
        self._side(path).check_deletable(path)

    def _note_deleted(self, path: str) -> None:
        """Notes what is about to be deleted near, for the other hosts' disks."""
        if self.disks and not self.index:
            deleted.note(self.near.steps.store, self.near.root, path)
            # Another job on this disk, which the run was taken from, may have marked a part beside the manifest.
            host_parts.forget(self.near.steps.store, path)

    def _drop(self, path: str) -> None:
        """Notes that a step is about to be dropped far, and takes its metrics: what is near is judged by them, too."""
        step = run.parse(posixpath.basename(path), self.far.steps.prefix)
        near = self.near.steps.committed().get(step) if step is not None else None
        if step is not None and near and self.is_copied(step, near, path):
            metrics.copy(self.far.steps.store, path, self.near.steps.store, near, self._copied[step][1])
            self._dropped[step] = self._copied[step][1]

    def copy_metrics(self) -> None:
        """Copies the metrics that steps got since they were copied."""
        near, far = self.near.steps.store, self.far.steps.store
        there = self.far.steps.committed()
        for step, path in self.near.steps.committed().items():
            if step in there and self._known_copied(step, path):
                metrics.copy(near, path, far, there[step], self._copied[step][1])
