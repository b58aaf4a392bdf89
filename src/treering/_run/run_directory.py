"""The directory of a run as the calls of a `Checkpointer` see it: a plain directory, or a local and a remote tier."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from .._core.calls import Call
from ..errors import SaveError
from ..keep import Saved
from .step_catalog import StepCatalog
from .step_fallback import StepCopy


class RunDirectory(Protocol):
    """Finds the steps of one run and changes those that Treering wrote; steps of other libraries are only read.

    With several processes only process 0 changes anything. The next save archives the steps after `back_to`, unless
    that is None. `restored_step` is the step that the job continued from, and may return to. `steps` caches the steps
    that a save adds to. `uploads` is None if there is one tier.
    """

    @property
    def back_to(self) -> int | None: ...
    @back_to.setter
    def back_to(self, step: int | None) -> None: ...
    @property
    def restored_step(self) -> int | None: ...
    @restored_step.setter
    def restored_step(self, step: int | None) -> None: ...
    @property
    def steps(self) -> StepCatalog: ...
    @property
    def root(self) -> str: ...
    @property
    def uploads(self) -> "Uploads | None": ...
    @property
    def is_held(self) -> bool:
        """True if this process has the lease of the run, and releases it when it has nothing more to do."""
        ...

    @property
    def lease_seconds(self) -> float:
        """All seconds in which this process has waited for the lease of the run."""
        ...

    @property
    def lost(self) -> bool:
        """True if another `Checkpointer` of this process has acquired the run."""
        ...

    # Reading

    def all_steps(self) -> Mapping[int, str]:
        """Returns the committed steps, ascending, and their paths, with those of other libraries."""
        ...

    def newest_step(self) -> int | None:
        """Returns the newest of `all_steps`; None without steps."""
        ...

    def step_copies(self, step: int) -> list[StepCopy]:
        """Returns the copies of a step. Raises `NotFoundError` if there is no such step."""
        ...

    def readable_copies(self, step: int | None = None) -> Iterable[StepCopy]:
        """Returns the copies of a step, or of all, newest first, that can be read."""
        ...

    def copy_at(self, step: int, path: str, format: str | None = None) -> StepCopy:
        """Returns the copy of a step at a path."""
        ...

    def valid_steps(self, *, foreign: bool = False) -> Sequence[Saved]:
        """Returns the valid steps, ascending; with `foreign` also those of other libraries."""
        ...

    def path(self, step: int) -> str:
        """Returns the directory of a step, even if it does not exist."""
        ...

    def pinned(self) -> list[int]:
        """Returns the pinned steps, ascending."""
        ...

    def mark_damaged(self, place: StepCopy) -> None:
        """Remembers that a copy of a step is damaged, until it is replaced."""
        ...

    def check_new(self) -> None:
        """Checks a directory without steps, and logs similar steps and runs; see `new_run`."""
        ...

    # Writing

    def acquire_run(self) -> bool:
        """Acquires the lease of the run. Returns True. Raises `ExistsError` if another writer has it."""
        ...

    def reserve_step(self, step: int, on_exists: str, pending_steps: Collection[int | None]) -> tuple[str, bool] | None:
        """Returns the path to save a step to, and True to overwrite it; None to skip the step. Raises `ExistsError`."""
        ...

    def acquire_for_save(self) -> None:
        """Acquires the lease for a save, and archives the steps after `back_to`. Raises `ExistsError`."""
        ...

    def clear_finished(self) -> None:
        """Notes that the run continues: removes the mark of a finished run."""
        ...

    def before_write(self, retain: Callable[[int | None], None]) -> bool:
        """Prepares a save before anything is written. `retain` deletes old steps in the background.

        Returns True if the save should wait until they are deleted.
        """
        ...

    def on_commit(self, step: int | None, retain: Callable[[int | None], None]) -> None:
        """Follows the commit of a step: calls `retain`, which deletes old steps except this one."""
        ...

    def protected_steps(self) -> set[int]:
        """Returns the steps that retention must not delete, whatever the policy says."""
        ...

    def remove(self, path: str, *, guard: Callable[[], None] | None = None) -> Callable[[], bool]:
        """Removes a step; see `removal.remove`. Raises `MismatchError` if it was pinned meanwhile, or is a link."""
        ...

    def end_writing(self) -> SaveError | None:
        """Ends the writing once all background jobs are done. Returns the error of a failed upload, or None."""
        ...

    def pin(self, step: int, wanted: bool) -> None:
        """Marks a step never to be deleted, or removes the mark."""
        ...

    def delete(self, step: int) -> None:
        """Deletes a step. Raises `MismatchError` for one that is pinned, is a link, or that a link leads to."""
        ...

    def rewind(self, step: int) -> None:
        """Archives the steps after a step, or all. Raises `NotFoundError` if there is no such step."""
        ...

    def finish(self) -> None:
        """Marks the run as finished."""
        ...


class Uploads(Protocol):
    """The uploads of a run from its local to its remote tier.

    `host_changes` is set if each host has a disk of its own, once `discover_hosts` has found that out.
    """

    @property
    def host_changes(self) -> "HostChanges | None": ...
    @property
    def uploading_step(self) -> int | None:
        """The step that is being uploaded."""
        ...

    def discover_hosts(self, call: Call) -> None:
        """Finds out whether all processes see the same local directory. Every process calls it first."""
        ...

    def lift_limit(self) -> None:
        """Ends the limit of bytes a second. A save may wait for room that an upload frees."""
        ...

    def wait_for_room(self, problem: str, retain: Callable[[], None], check: Callable[[], None]) -> str | None:
        """Waits until `retain` has deleted an uploaded step. Returns the reason if nothing under way frees room."""
        ...

    def begin_restore(self, call: Call) -> None:
        """Finds which disk has which file of the local steps. All processes call it before they restore one."""
        ...

    def end_restore(self) -> None:
        """Forgets what `begin_restore` has found."""
        ...

    def uncopied(self) -> list[int]:
        """Returns the steps that are not uploaded yet, or not known to be."""
        ...

    def is_on_two_hosts(self, path: str) -> bool:
        """Returns True if the disks of two hosts have each file of the local step at a path. Process 0 knows it."""
        ...

    def acquire_for_upload(self) -> bool:
        """Acquires the leases if a step is to be uploaded. Returns True if this process has them."""
        ...

    def upload_all(self) -> None:
        """Waits until every step is uploaded. Raises `SaveError`."""
        ...

    def clear_memory(self, call: Call) -> None:
        """Removes the local steps, if they are in memory. Every process calls it, once all steps are uploaded."""
        ...


class HostChanges(Protocol):
    """What the hosts of a job do together if each has a disk of its own; see `tiers.joint_changes`."""

    @property
    def hosts(self) -> tuple[int, ...]:
        """For each process, the lowest process that shares its disk. It leads the host."""
        ...

    @property
    def local_copies(self) -> int: ...
    def orders(self) -> Any: ...
    def prepare(self, path: str, orders: Any, back_to: int | None) -> str: ...
    def saved(self, step: int) -> None: ...
    def deleted(self, step: int) -> None: ...
    def pinned(self, step: int, wanted: bool) -> None: ...
    def rewound(self, step: int) -> None: ...
    def free_room(self) -> None: ...
    def claim(self, call: Call, claim: Callable[[], bool]) -> bool: ...
    def upload_last(self, call: Call, claim: Callable[[], bool]) -> None: ...
