"""Changes of a run's steps that every process of a job makes together: pins, deletions and rewinds."""

from collections.abc import Callable

from .._core.entries import step_number
from .collective import CollectiveCalls
from .run_directory import RunDirectory, Together
from .run_layout import BEFORE_FIRST_STEP


def pin(collective: CollectiveCalls, directory: RunDirectory, step: int, wanted: bool) -> None:
    """Marks a step never to be deleted, or removes the mark. See `Checkpointer.pin` and `unpin`."""
    what = f"{'pin' if wanted else 'unpin'}({step})"
    _change(
        collective, directory, what,
        lambda: directory.pin(step, wanted), lambda hosts: hosts.pinned(step_number(step), wanted),
    )  # fmt: skip


def delete(collective: CollectiveCalls, directory: RunDirectory, step: int) -> None:
    """Deletes a step. See `Checkpointer.delete`."""
    _change(
        collective, directory, f"delete({step})",
        lambda: directory.delete(step), lambda hosts: hosts.deleted(step_number(step)),
    )  # fmt: skip


def rewind(collective: CollectiveCalls, directory: RunDirectory, step: int | None) -> None:
    """Archives the steps after a step, or all. See `Checkpointer.rewind`."""
    number = BEFORE_FIRST_STEP if step is None else step
    collective.check_open()
    _change(
        collective, directory, f"rewind({step})",
        lambda: directory.rewind(number), lambda hosts: hosts.rewound(number),
    )  # fmt: skip
    directory.back_to = None


def _change(
    collective: CollectiveCalls,
    directory: RunDirectory,
    what: str,
    action: Callable[[], object],
    on_other_disks: Callable[[Together], None],
) -> None:
    """Waits for every save, calls `action` in process 0, and then changes the disks of the other hosts.

    what: names the call. on_other_disks: called in all processes, only if each host has its own disk. All processes
        raise the error of `action`.
    """
    collective.once_settled(what, action)
    if (uploads := directory.uploads) and uploads.together:
        on_other_disks(uploads.together)
