"""What all processes of a job do for a run where each host has a disk of its own, with a part of each step."""

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
    """Brings the other hosts' disks along with what process 0 does on its own, and begins to copy from all of them.

    Every process of the job calls each of these methods, but for `word`, at the same place.
    """

    def __init__(self, places: "TwoPlaces", disks: HostDisks, copies: Copies):
        self._places, self._disks, self._copies = places, disks, copies

    def word(self) -> Any:
        """What process 0 tells the others about the run before a save."""
        return [self._places.origin.mark().decode(), sorted(self._disks.aside)]

    def hear(self, word: Any) -> None:
        """Hears it."""
        mark, aside = word
        with as_save_error(self._places.near.root):
            self._disks.take_part(self._places.origin, mark.encode(), aside)

    def prepare(self, path: str, word: Any, back_to: int | None) -> str:
        """Before a save: hears the word, and sets later steps aside. Returns where the step goes on this disk."""
        self.hear(word)
        if back_to is not None:
            self._set_aside_after(back_to)
        return posixpath.join(self._places.near.root, posixpath.basename(path))

    def saved(self, step: int) -> None:
        """After a commit."""
        self._copy(f"step {step}")

    def deleted(self, step: int) -> None:
        """After a step was deleted."""
        self._disks.forget([path for one, path in steps_in_part(self._places.near.steps).items() if one == step])
        self._copy(f"the deletion of step {step}")

    def rewound(self, step: int) -> None:
        """After a rewind."""
        self._set_aside_after(step)
        self._copy("the rewind" if step < 0 else f"the rewind to step {step}")

    def _set_aside_after(self, step: int) -> None:
        self._disks.set_aside([path for one, path in steps_in_part(self._places.near.steps).items() if one > step])

    def _copy(self, after: str, **options: Any) -> None:
        self._copies.begin_together(self._disks, after, self._places.index, **options)

    def copy_last(self, call: Call, claim: Callable[[], bool]) -> None:
        """Begins to copy the rest, without a limit, if `claim` says so in process 0."""

        def claimed() -> bool:
            with as_save_error(self._places.root):
                return claim()

        if call.broadcast(claimed):
            self._copies.lift_limit()
            self._copy("the last one", then=self._places.retain)

    def copy_before(self, call: Call, step: int | None) -> None:
        """Copies what is to be restored: it can be read where the run stays alone. Raises `SaveError`."""
        copied = begun = False
        while not copied:
            wanted, word = call.broadcast(lambda: self._claim_uncopied(step))
            if wanted is None:
                break
            begun = True
            self.hear(word)
            self._copies.interrupt(self._places.index)
            self._copy(f"a restore of step {wanted}", only=wanted)
            self._copies.wait()
            copied = call.broadcast(functools.partial(self._check_copied, wanted))
        if begun:
            self._copy("what was restored")

    def _claim_uncopied(self, step: int | None) -> tuple[int | None, Any]:
        """The step to be restored, where it is whole only near; takes the locks, unless another job writes the run."""
        places = self._places
        far = {one.step for one in places.far.good()}
        good = {one.step for one in places.near.good()}
        wanted = {*places.uncopied(), *(places.near_steps().keys() - far)} & good
        newest = max((one for one in wanted if one >= max(far, default=-1)), default=None)
        chosen = newest if step is None else step
        if chosen not in wanted or not places.claim_if_free():
            return None, None
        places.far.reading = chosen  # or the policy, which may not want it, takes it away while it is read
        return chosen, self.word()

    def _check_copied(self, step: int) -> bool:
        """Whether a step that is to be restored was copied. Raises `SaveError` where it was not, and is not damaged."""
        places = self._places
        near, far = places.near.steps.committed().get(step), places.far.steps.committed().get(step)
        if near is None or places.near.steps.is_damaged(step, near):
            return False
        if places.is_copied(step, near, far):
            return True
        error = self._copies.error
        raise SaveError(
            f"{places.root}: step {step} is on the disks of the hosts, and could not be copied to be restored: "
            f"{error}; try again, or restore an earlier one with step="
        ) from error
