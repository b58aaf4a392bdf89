"""The paths of the copies of a step, and what each copy survives."""

import posixpath

from ..stores import survival
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


def copy_paths(directory: RunDirectory, step: int) -> list[CopyPath]:
    """Returns the paths of all copies of a step, the local one first. Raises `NotFoundError` if there is none."""

    def survives(place: StepCopy) -> str:
        found, uploads = survival.survives(place.store, place.path), directory.uploads
        if uploads and found != survival.ALL_HOSTS and posixpath.dirname(place.path) != directory.root:
            return survival.ANY_HOST if uploads.is_on_two_hosts(place.path) else found
        return found

    return [CopyPath(place.path, survives(place)) for place in directory.step_copies(step)]
