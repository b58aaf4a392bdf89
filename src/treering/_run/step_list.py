"""The part of a Checkpointer that only reads: the steps of its run, and the paths of their copies."""

import posixpath
from typing import Literal

from .._core.entries import step_number
from .._core.tracebacks import hide_internal_frames_of_methods
from ..stores import probe
from . import metrics
from .pending_saves import PendingSaves
from .run_directory import RunDirectory
from .step_fallback import StepCopy


class CopyPath(str):
    """The path of a copy of a step.

    survives: what this copy survives: "nothing", "the process", "the process and a restart of the host", "the loss of
        any one host", or "the loss of all hosts".
    """

    survives: str

    def __new__(cls, path: str, survives: str = "") -> "CopyPath":
        copy = super().__new__(cls, path)
        copy.survives = survives
        return copy


def _copy_paths(directory: RunDirectory, step: int) -> list[CopyPath]:
    """Returns the paths of all copies of a step, the local one first. Raises `NotFoundError` if there is none."""

    def survives(place: StepCopy) -> str:
        found, uploads = probe.survives(place.store, place.path), directory.uploads
        if uploads and found != probe.ALL_HOSTS and posixpath.dirname(place.path) != directory.root:
            return probe.ANY_HOST if uploads.is_on_two_hosts(place.path) else found
        return found

    return [CopyPath(place.path, survives(place)) for place in directory.step_copies(step)]


@hide_internal_frames_of_methods
class StepList:
    """The steps of a run, and where they are."""

    _directory: RunDirectory
    _pending_saves: PendingSaves

    @property
    def steps(self) -> list[int]:
        """The steps of the run, ascending: those committed, and those that this `Checkpointer` is saving.

        `save` refuses to save these steps again. The step of a failed save leaves the list.
        """
        return sorted({*self._pending_saves.pending_steps(), *self._directory.all_steps()})

    @property
    def committed_steps(self) -> list[int]:
        """The committed steps, ascending, with those that another library has left in the directory."""
        return list(self._directory.all_steps())

    @property
    def latest_step(self) -> int | None:
        """The newest of `steps`, or None if there is none."""
        newest = self._directory.newest_step()
        return max([*self._pending_saves.pending_steps(), *(() if newest is None else (newest,))], default=None)

    @property
    def restored_step(self) -> int | None:
        """The step that was restored, from which the loop continues; None before that."""
        return self._directory.restored_step

    @property
    def pinned(self) -> list[int]:
        """The steps that are never deleted, ascending."""
        return self._directory.pinned()

    @property
    def disk_usage(self) -> dict[int, int]:
        """The valid steps, and the bytes of the files of each. A file that several steps share counts in each."""
        return {one.step: one.nbytes for one in self._directory.valid_steps()}

    def best_step(self, metric: str, mode: Literal["min", "max"]) -> int | None:
        """Returns the best valid step by a metric; None if there are no metrics yet. NaN is never best.

        Raises `MismatchError` for a metric that no step has, if steps have other metrics.
        """
        return metrics.best(self._directory.valid_steps(foreign=True), metric, mode)

    def path(self, step: int) -> str:
        """Returns the directory of a step, even if it does not exist."""
        return self._directory.path(step_number(step))

    def copies(self, step: int) -> list[CopyPath]:
        """Returns the paths of all copies of a step, the local one first. Raises `NotFoundError` if there is none.

        Each is a `str` with an attribute `survives`: "the process" for memory, "the process and a restart of the host"
        for a disk, "the loss of any one host" for the disks of two hosts, "the loss of all hosts" for a bucket or a
        network file system.
        """
        return _copy_paths(self._directory, step)

    @property
    def uncopied(self) -> list[int]:
        """The steps that are only in `local`, or not known to be uploaded, ascending; none without a `local`."""
        uploads = self._directory.uploads
        return uploads.uncopied() if uploads else []
