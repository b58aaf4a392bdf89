"""Removes a step from its run. Retention, `prune`, `delete` and the adapter do it here, each with its own guards.

The changes that every process of a job makes together are here too: pins, deletions and rewinds.
"""

import itertools
import posixpath
from collections.abc import Callable
from typing import TYPE_CHECKING

from .._core.entries import step_number
from ..formats.orbax import run as orbax
from ..formats.treering import removal as native
from ..formats.treering import summary
from ..stores import lease_registry
from ..stores.store import Store
from .run_directory import HostChanges, RunDirectory
from .run_layout import BEFORE_FIRST_STEP, RunLayout

if TYPE_CHECKING:
    from .collective import CollectiveCalls  # It imports JAX, which a removal by the command line does not need.


def pin(collective: "CollectiveCalls", directory: RunDirectory, step: int, wanted: bool) -> None:
    """Marks a step never to be deleted, or removes the mark. See `Checkpointer.pin` and `unpin`."""
    what = f"{'pin' if wanted else 'unpin'}({step})"
    _change(
        collective, directory, what,
        lambda: directory.pin(step, wanted), lambda hosts: hosts.pinned(step_number(step), wanted),
    )  # fmt: skip


def delete(collective: "CollectiveCalls", directory: RunDirectory, step: int) -> None:
    """Deletes a step. See `Checkpointer.delete`."""
    _change(
        collective, directory, f"delete({step})",
        lambda: directory.delete(step), lambda hosts: hosts.deleted(step_number(step)),
    )  # fmt: skip


def rewind(collective: "CollectiveCalls", directory: RunDirectory, step: int | None) -> None:
    """Archives the steps after a step, or all. See `Checkpointer.rewind`."""
    number = BEFORE_FIRST_STEP if step is None else step
    collective.check_open()
    _change(
        collective, directory, f"rewind({step})",
        lambda: directory.rewind(number), lambda hosts: hosts.rewound(number),
    )  # fmt: skip
    directory.back_to = None


def _change(
    collective: "CollectiveCalls",
    directory: RunDirectory,
    what: str,
    action: Callable[[], object],
    on_other_disks: Callable[[HostChanges], None],
) -> None:
    """Waits for every save, calls `action` in process 0, and then changes the disks of the other hosts.

    what: names the call. on_other_disks: called in all processes, only if each host has its own disk. All processes
        raise the error of `action`.
    """
    collective.once_settled(what, action)
    if (uploads := directory.uploads) and uploads.host_changes:
        on_other_disks(uploads.host_changes)


Guard = Callable[[], None]  # raises if the step must stay


def remove(
    store: Store, path: str, layout: RunLayout, prepare: Guard = lambda: None, guard: Guard | None = None
) -> Callable[[], bool]:
    """Removes a step from its run, which is quick. Returns a function that removes its files, which is slow.

    The returned function returns False if another process has removed the step at the same time.

    prepare, guard: called right before the step leaves the run, `guard` also right after. The step stays if one raises.
    """

    def check() -> None:
        prepare()
        if guard:
            guard()

    if layout.deleted_to is not None:
        return _move_away(store, path, posixpath.join(posixpath.dirname(path), layout.deleted_to), check)
    if layout.shared_with_orbax and summary.stat_manifest(store, path) is None:
        return orbax.unpublish(store, path, check)
    return native.unpublish(store, path, check, guard)


def _move_away(store: Store, path: str, to: str, check: Callable[[], None]) -> Callable[[], bool]:
    """Moves a step into another directory, after `check`."""
    native.check_removable(store, path)
    check()
    lease_registry.check(path)
    store.make_folders(to, [])
    name = posixpath.basename(path)
    taken = set(store.list(to))
    free = next(new for n in itertools.count() if (new := f"{name}.{n}" if n else name) not in taken)
    try:
        store.move(path, posixpath.join(to, free), last=summary.manifest_path(""))
    except FileNotFoundError:  # Another process deletes the same step.
        return lambda: False
    store.settle(to)
    store.settle(posixpath.dirname(path))
    return lambda: True
