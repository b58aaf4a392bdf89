"""Removes an Orbax checkpoint from a run."""

import posixpath
from collections.abc import Callable

from ...stores import lease_registry
from ...stores.file_io import files_in, remove_unused
from ...stores.store import Store
from ...stores.temporary_names import temporary_sibling
from .schema import ARRAY_META, CHECKPOINT, COMMITTED, DATABASE, SHARDINGS, STATE, TREE, UNFINISHED

_MARKS = {CHECKPOINT, COMMITTED, TREE, STATE, SHARDINGS, DATABASE, ARRAY_META}


def unpublish(store: Store, path: str, check: Callable[[], None] = lambda: None) -> Callable[[], bool]:
    """Removes a checkpoint from its run, which is quick. Returns a function that removes its files, which is slow.

    On a disk the folder gets a temporary name first, so readers never see half of it. In a bucket the files go first
    by which Orbax and Treering recognize a checkpoint. Files of other programs in the folder are removed too, as Orbax
    does.

    check: called right before; it may raise. Raises `LeaseLostError` if another job has acquired the lease of the run.
    """
    check()
    lease_registry.check(path)
    if not store.has_folders:
        names = list(files_in(store, path))
        marks = [name for name in names if _MARKS & {*name.split("/")}]
        # The root's come first: without them, items are looked for only where they have marks of their own.
        store.delete_all(path, sorted(marks, key=lambda name: name.count("/")))

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
        remove_unused(store, hidden)
        return True

    return remove_folder


def remove_unfinished(store: Store, run: str, is_step: Callable[[str], bool]) -> None:
    """Removes the folders of the unfinished saves of Orbax in a run. `is_step` tells the names of steps."""
    for name in store.list(run):
        if UNFINISHED in name and is_step(name.partition(UNFINISHED)[0]):
            unpublish(store, posixpath.join(run, name))()
