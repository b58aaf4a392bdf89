"""Removes an Orbax checkpoint from a run."""

import contextlib
import posixpath
from collections.abc import Callable

from ...stores import lease_registry
from ...stores.file_io import files_in
from ...stores.store import Store
from ...stores.temporary_names import temporary_sibling
from .schema import CHECKPOINT, COMMITTED


def unpublish(store: Store, path: str, check: Callable[[], None] = lambda: None) -> Callable[[], bool]:
    """Removes a checkpoint from its run, which is quick. Returns a function that removes its files, which is slow.

    On a disk the folder gets a temporary name first, so readers never see half of it. In a bucket the marks of
    completion go first. Files of other programs in the folder are removed too, as Orbax does.

    check: called right before; it may raise. Raises `LeaseLostError` if another job has acquired the lease of the run.
    """
    check()
    lease_registry.check(path)
    if not store.has_folders:
        names = list(files_in(store, path))
        store.delete_all(path, [COMMITTED, CHECKPOINT])

        def remove_files() -> bool:
            store.delete_all(path, names)
            return True

        return remove_files
    hidden = temporary_sibling(path)
    try:
        store.move(path, hidden, last="")
    except FileNotFoundError:  # Another process deletes the same checkpoint.
        return lambda: False
    store.settle(posixpath.dirname(path))

    def remove_folder() -> bool:
        with contextlib.suppress(FileNotFoundError):
            store.remove_leftover(hidden)
        return True

    return remove_folder
