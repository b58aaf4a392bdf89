"""A run in two tiers: steps are saved to the local tier and uploaded from there to the remote tier."""

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
    """Saves steps locally and uploads them. The next save archives local steps of abandoned branches."""

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
        self._seen_far: Sequence[Saved] = []  # the valid steps of the remote tier, as of the last listing
        self._ended = False
        self._dropped: dict[int, str] = {}  # steps that the policy has deleted remotely, and their identities
        near.before_delete, far.before_delete = self._note_deleted, self._drop
        self._retain: Callable[[int | None], None] = lambda step: None
        self._ever_far: set[int] = set()  # A save looks at the remote tier only for these steps.
        self.far_retention = Retention(far, keep)
        self._copies = Copies(self, self.far_retention, bytes_per_second, tell, timeout)
        self.together: Together | None = None

    @property
    def claimed(self) -> bool:
        """True if this process holds the leases of both tiers, and the local steps belong to the run."""
        return self._claimed and not self.lost and os.getpid() == self._process

    held = False  # Each of the two directories has its own lease.

    def begin_copying(self) -> None:
        """Uploads missing steps in the background, and deletes the steps that the policy does not keep."""
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
        """Acquires both leases, and archives local steps that do not belong to the run."""
        self.near.acquire()
        if self._claimed:
            if self.far.lost:
                self.far.acquire()  # This raises the error.
            self._copies.check()
            self.origin.keep_near()
            return
        self.far.acquire()
        # Archive first: the mark declares that all local steps belong to the run.
        self._set_aside(self._of_no_use())
        self._forget_copied_parts()
        self.origin.set_near(apart=self.disks is not None)
        self._ever_far.update(self.far.steps.committed())
        self._claimed = True
        self._copies.begin()

    def _of_no_use(self) -> dict[int, str]:
        """Returns the local steps, and their paths, that do not belong to the run and are not in the remote tier."""
        near = self.near.steps.committed()
        found = {**near, **steps_in_part(self.near.steps)}
        if self.origin.is_newest():
            lacking = self.disks.lacking if self.disks else set()
            if not self.disks and self.origin.was_apart():  # The other files are on hosts that this job lacks.
                lacking = {step for step, path in found.items() if not host_parts.is_whole(self.near.steps.store, path)}
            found = {step: path for step, path in found.items() if step in lacking or step not in near}
        far = self.far.steps.committed() if found else {}
        return {step: path for step, path in found.items() if step not in far or not self._may_be(path, far[step])}

    def _may_be(self, path: str, other: str) -> bool:
        """Returns True if the local step may be the remote step or a part of it. Its manifest may be damaged."""
        return host_parts.identities(self.near.steps.store, path) <= host_parts.identities(self.far.steps.store, other)

    def _forget_copied_parts(self) -> None:
        """Forgets parts of steps without a local manifest that are complete remotely: no upload needs them."""
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
            _log.warning("%s: steps that do not belong to the run were archived in %s", self.near.root, place)
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
        if self.disks and found and found[1]:
            # Other hosts may have parts of the replaced step for a while: they are to be deleted, not archived.
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
        retain(None)  # No save is running now. This deletes the steps that were uploaded since the last save.
        return True  # A local disk may not have room for another step.

    def committed(self, step: int | None, retain: Callable[[int | None], None]) -> None:
        if step is not None:
            self._saved.add(step)
            self._copied.pop(step, None)
        self._ended = False
        self._copies.begin()

    def needed(self) -> set[int]:
        """Returns the local steps that must stay: those that the policy keeps and that may not be uploaded yet."""
        good = self.near.good()
        wanted = {one.step for one in good if self._keep is None or one is good[-1]}
        if self._keep is not None:  # The remote tier alone may have newer steps.
            both = {one.step: one for one in [*self._seen_far, *good]}
            wanted |= self._keep.kept([both[step] for step in sorted(both)])
        self._saved -= {one.step for one in good} - wanted  # These may be deleted without an upload.
        return {*self.near.needed(), *wanted.intersection(self._not_known_to_be_far(self._known_near()))}

    def retain(self) -> None:
        """Deletes old local steps, as after a save."""
        self._retain(None)

    def leave(self) -> SaveError | None:
        if self.index:
            self._copies.lift_limit()
            self._copies.wait()  # Process 0 leads the upload and waits for it there.
        own = self._claimed and os.getpid() == self._process and not self._ended
        problem = self._problem(self._copies.finish() if self.claimed else self._copies.taken_over) if own else None
        self._claimed = False
        for one in (self.far, self.near):
            try:
                one.leave()
            except BaseException:  # Release the other lease as well, and return the problem with the upload.
                _log.exception("%s: the lease of the run was not released", one.root)
        return problem

    def pin(self, step: int, wanted: bool) -> None:
        places = self.candidates(step)
        if places[0].path in self.near_steps().values():  # First: an upload that ends meanwhile then copies the pin.
            pins.pin(self.near.steps.store, places[0].path, wanted)
        if path := self.far.steps.committed().get(step_number(step)):
            pins.pin(self.far.steps.store, path, wanted)

    def delete(self, step: int) -> None:
        with self._copies.paused():
            self._seen_far = []
            places = self.candidates(step)
            for place in places:
                self._side(place.path).check_may_go(place.path)
            for place in places:  # Local first: a step that is only local would be uploaded again.
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
        """Acquires the leases if a step is to be uploaded and this job has saved or restored one."""
        if not self._claimed and self.restored is not None and self.uncopied():
            self.claim_if_free()
        return self._claimed

    def claim_if_free(self) -> bool:
        """Acquires the leases; logs it if another job writes the run. Returns True if this job has them."""
        try:
            return self._claimed or self.claim()
        except ExistsError as error:
            _log.warning("%s: steps are not uploaded from %s: %s", self.root, self.near.root, error)
            return False

    def claim(self) -> bool:
        """Acquires the leases."""
        self._claim()
        return True

    def copy_all(self) -> None:
        """Waits until all local steps are uploaded, also those of earlier jobs. Raises `SaveError`."""
        if os.getpid() != self._process:
            return
        if self.claim_for_copying():
            self._ended = True  # `leave` does not try again.
            error = self._copies.finish() if self.claimed else self._copies.taken_over
            self._retain(None)
            if problem := self._problem(error):
                raise problem

    def _problem(self, error: BaseException | None) -> SaveError | None:
        """Returns an error that names the steps that are not in the remote tier, and why. None if all are."""
        near = self.near.steps.committed()
        lacking = self._saved.union(self.to_copy() if self.claimed and not error else self.uncopied())
        gone = sorted(step for step in lacking if step not in near or self.near.steps.is_damaged(step, near[step]))
        if error is None and not gone and (self.claimed or not lacking):
            return None
        there = ", ".join(str(step) for step in sorted(lacking) if step not in gone)
        parts = [f"{self.root}: not all steps are there, because uploading them failed"]
        parts += ["another job, or another Checkpointer of this process, has acquired the run"] if self.lost else []
        parts += [str(error)] if error else []
        parts += [f"steps {there} are in {self.near.root}; the next job with this local= uploads them"] if there else []
        parts += [f"steps {', '.join(map(str, gone))} are damaged in {self.near.root}, or deleted"] if gone else []
        problem = SaveError("; ".join(parts))
        problem.__cause__ = error
        return problem

    def to_copy(self) -> list[int]:
        """Returns the valid local steps to upload, newest first: the policy keeps them, and no valid copy is remote."""
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
        """Uploads a step. Returns False if the remote tier has it already. Calls `moved` with bytes to be sent."""
        near, far = self.near.steps.store, self.far.steps.store
        self.origin.set_far()
        self._ever_far.add(step)
        there = self.far.steps.committed().get(step)
        path, to = self.near.own_path(step), there or self.far.own_path(step)
        if there and not self.far.steps.is_damaged(step, there) and self.is_copied(step, path, there):
            # An earlier request failed, so the upload seemed to be missing. Uploading a step over itself would remove
            # its files.
            return False
        others = self.disks and self.disks.copying(path, to)
        try:
            if there and self.far.steps.is_damaged(step, there):
                copy.check(near, path, others)  # Otherwise the damaged remote step may be the better one.
                self._copied.pop(step, None)  # From here on the local step is the only copy.
                removal.delete(far, there)  # Its files may have the names of the uploaded ones.
            seen = summary.look(near, path)
            overwrite = summary.look(far, to) is not None
            identity = copy.copy(near, path, far, to, overwrite=overwrite, moved=moved, others=others)
        except CorruptError:
            if others:  # No restore would find the damage: it would read the remote copy.
                self.near.steps.mark_damaged(step, path)
            raise
        if seen:
            self._note_copied(step, seen.version, identity)
        return True

    def check_deletable(self, path: str) -> None:
        self._side(path).check_deletable(path)

    def _note_deleted(self, path: str) -> None:
        """Marks a local step that is about to be deleted, so that the other hosts delete their files of it."""
        if self.disks and not self.index:
            deleted.note(self.near.steps.store, self.near.root, path)
            # Another job on this disk, which lost the run to this one, may have marked a part next to the manifest.
            host_parts.forget(self.near.steps.store, path)

    def _drop(self, path: str) -> None:
        """Notes a remote step that is about to be deleted. Keeps its metrics: local steps are ranked by them."""
        step = run.parse(posixpath.basename(path), self.far.steps.prefix)
        near = self.near.steps.committed().get(step) if step is not None else None
        if step is not None and near and self.is_copied(step, near, path):
            metrics.copy(self.far.steps.store, path, self.near.steps.store, near, self._copied[step][1])
            self._dropped[step] = self._copied[step][1]

    def copy_metrics(self) -> None:
        """Uploads the metrics that steps got after their upload."""
        near, far = self.near.steps.store, self.far.steps.store
        there = self.far.steps.committed()
        for step, path in self.near.steps.committed().items():
            if step in there and self._known_copied(step, path):
                metrics.copy(near, path, far, there[step], self._copied[step][1])
