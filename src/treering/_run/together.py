"""Collective changes of a run in which each host has its own disk, with a part of each step."""

import functools
import posixpath
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._processes.calls import Call
from .._save.pending import as_save_error
from ..errors import SaveError
from .copies import Copies
from .host_disks import HostDisks, steps_in_part

if TYPE_CHECKING:
    from .two_places import TwoPlaces


class Together:
    """Applies to the other hosts' disks what process 0 does on its own disk, and begins uploads from all disks.

    Every process of the job calls each of these methods in the same order, except `run_state`, which process 0 calls.
    """

    def __init__(self, places: "TwoPlaces", disks: HostDisks, copies: Copies):
        self._places, self._disks, self._copies = places, disks, copies

    def run_state(self) -> Any:
        """Returns the state to broadcast before a save: the mark of process 0's disk, and the steps to archive."""
        return [self._places.origin.mark().decode(), sorted(self._disks.to_archive)]

    def apply_run_state(self, run_state: Any) -> None:
        """Applies the state of `run_state` on this host."""
        mark, to_archive = run_state
        with as_save_error(self._places.local.root):
            self._disks.take_part(self._places.origin, mark.encode(), to_archive)

    def prepare(self, path: str, run_state: Any, back_to: int | None) -> str:
        """Applies the state, and archives steps after `back_to`. Returns the path of the new step on this disk."""
        self.apply_run_state(run_state)
        if back_to is not None:
            self._archive_after(back_to)
        return posixpath.join(self._places.local.root, posixpath.basename(path))

    def saved(self, step: int) -> None:
        """Begins an upload after a step was committed."""
        self._copy(f"step {step}")

    def deleted(self, step: int) -> None:
        """Deletes the parts of a step that process 0 has deleted."""
        self._disks.forget([path for one, path in steps_in_part(self._places.local.steps).items() if one == step])
        self._copy(f"the deletion of step {step}")

    def rewound(self, step: int) -> None:
        """Archives the parts of later steps after a rewind."""
        self._archive_after(step)
        self._copy("the rewind" if step < 0 else f"the rewind to step {step}")

    def free_room(self) -> None:
        """Waits for a round, in which the hosts delete the files of steps that process 0 has deleted."""
        self._copy("a save found a disk full")
        self._copies.wait()

    def _archive_after(self, step: int) -> None:
        self._disks.archive([path for one, path in steps_in_part(self._places.local.steps).items() if one > step])

    def _copy(self, after: str, **options: Any) -> None:
        self._copies.begin_together(self._disks, after, self._places.index, **options)

    def copy_last(self, call: Call, claim: Callable[[], bool]) -> None:
        """Begins to upload the remaining steps, without the limit, if `claim` returns True in process 0."""

        def claimed() -> bool:
            with as_save_error(self._places.root):
                return claim()

        if call.broadcast(claimed):
            self._copies.lift_limit()
            self._copy("the last one", then=self._places.retain)

    def copy_before(self, call: Call, step: int | None) -> None:
        """Uploads the step to be restored: only the remote tier has it for all processes. Raises `SaveError`."""
        copied = begun = False
        while not copied:
            wanted, run_state = call.broadcast(lambda: self._claim_uncopied(step))
            if wanted is None:
                break
            begun = True
            self.apply_run_state(run_state)
            self._copies.interrupt(self._places.index)
            self._copy(f"a restore of step {wanted}", only=wanted)
            self._copies.wait()
            copied = call.broadcast(functools.partial(self._check_copied, wanted))
        if begun:
            self._copy("what was restored")

    def _claim_uncopied(self, step: int | None) -> tuple[int | None, Any]:
        """Returns the step to restore if only local disks have it. Acquires the leases, if no other job has them."""
        places = self._places
        remote = {one.step for one in places.remote.valid_steps()}
        valid = {one.step for one in places.local.valid_steps()}
        wanted = {*places.uncopied(), *(places.local_steps().keys() - remote)} & valid
        newest = max((one for one in wanted if one >= max(remote, default=-1)), default=None)
        chosen = newest if step is None else step
        if chosen not in wanted or not places.acquire_if_free():
            return None, None
        places.remote.step_to_restore = chosen  # Otherwise retention may delete it while it is read.
        return chosen, self.run_state()

    def _check_copied(self, step: int) -> bool:
        """Returns True if the step to restore is uploaded, False if it is damaged. Otherwise raises `SaveError`."""
        places = self._places
        local, remote = places.local.steps.committed().get(step), places.remote.steps.committed().get(step)
        if local is None or places.local.steps.is_damaged(step, local):
            return False
        if places.is_copied(step, local, remote):
            return True
        error = self._copies.error
        raise SaveError(
            f"{places.root}: step {step} is on the disks of the hosts, and could not be uploaded to be restored: "
            f"{error}; try again, or restore an earlier one with step="
        ) from error
