"""What Orbax has in the folder of a run: the metadata for all of its steps, and steps that are removed."""

import contextlib
import json
import logging
import posixpath
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import CorruptError, ExistsError, UnsafeError
from ...stores import lease_registry
from ...stores.file_io import files_in, is_file, remove_unused
from ...stores.store import Store
from ...stores.temporary_names import temporary_sibling
from .schema import ARRAY_META, CHECKPOINT, COMMITTED, DATABASE, SHARDINGS, STATE, TREE, UNFINISHED, read_json

_FOLDER = "metadata"
_FILES = ("_ROOT_METADATA", "metadata")  # early releases: the latter
_log = logging.getLogger("treering")
_MARKS = {CHECKPOINT, COMMITTED, TREE, STATE, SHARDINGS, DATABASE, ARRAY_META}


def read_run_metadata(store: Store, run: str) -> Any:
    """Reads the metadata of a run; None if there is none. Logs it if they are damaged."""
    for name in _FILES:
        file = posixpath.join(run, _FOLDER, name)
        if is_file(store, file):
            try:
                found = read_json(store, file)
            except UnsafeError:
                raise
            except CorruptError as error:
                _log.warning("%s: opened without the metadata of the run: %s", run, error)
                return None
            if name == _FILES[0]:
                found = found.get("custom_metadata") if isinstance(found, dict) else None
            return found or None
    return None


def write_run_metadata(store: Store, run: str, metadata: Mapping[str, Any]) -> None:
    """Writes the metadata of a run that has none yet. Raises `TypeError` if they are not JSON."""
    data = json.dumps({"custom_metadata": dict(metadata)}).encode()
    folder = posixpath.join(run, _FOLDER)
    store.make_folders(folder, [])
    with (
        contextlib.suppress(ExistsError),  # An earlier job has written them.
        store.new_file(posixpath.join(folder, _FILES[0]), overwrite=False) as file,
    ):
        file.write(data)


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
