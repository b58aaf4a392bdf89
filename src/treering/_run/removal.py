"""Removes a step from its run. Retention, `prune`, `delete` and the adapter do it here, each with its own guards."""

import itertools
import posixpath
from collections.abc import Callable

from ..formats.orbax import run as orbax
from ..formats.treering import removal as native
from ..formats.treering import summary
from ..stores import lease_registry
from ..stores.store import Store
from .run_layout import RunLayout

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
