"""Finds the files of an Orbax checkpoint in a folder: those it lists, not others that have such names."""

import os
import posixpath
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ...errors import TreeringError
from ...stores.file_io import files_in, is_file, is_folder
from ...stores.read_errors import raise_if_momentary
from ...stores.store import Store
from .._shared.msgpack import MAP, beginning, tokens
from .._zarr.folder import DATABASE
from .._zarr.leaves import database_parts, parts_of
from .items import VALUES
from .iterators import HANDLERS, state_files
from .metadata import STRINGS, read_metadata
from .schema import (
    ARRAY_META,
    ARRAY_META_FILE,
    CHECKPOINT,
    COMMITTED,
    DELETED,
    SHARDINGS,
    STATE,
    STEP,
    TREE,
    read_checkpoint_metadata,
    read_json,
)
from .tree import placeholder, read_aggregated

_MAX_NESTED_LEVELS = 2  # levels of items that consist of items
_VERSION_1 = "orbax.checkpoint"
NAMES = {CHECKPOINT, TREE, STATE, COMMITTED, SHARDINGS, STRINGS, ARRAY_META, DATABASE, "d", _VERSION_1, DELETED}
_COMMIT_PREFIXES = (b"committed", b"Checkpoint commit was successful")  # the beginnings of a mark of completion


def owned_files(store: Store, folder: str) -> Collection[str]:
    """Returns the files of a checkpoint, as paths within its folder."""
    found = {CHECKPOINT, *_marks(store, folder), *_json(store, folder, DELETED)}
    mark = store.stat(posixpath.join(folder, _VERSION_1))
    if mark is not None and mark.is_file and not mark.nbytes:
        found.add(_VERSION_1)
    if is_folder(store, posixpath.join(folder, "descriptor")):
        found.add("descriptor/descriptor.pbtxt")
    tree = set(_tree(store, folder))
    if tree:  # a tree directly in the folder; a checkpoint has either this or items
        return found | tree
    handlers = _handlers(store, folder)
    if isinstance(handlers, str) and handlers.rpartition(".")[2] in HANDLERS:  # of an iterator directly in the folder
        found.update(state_files(store, folder))
    for name in _items(store, folder, handlers):
        found.update(f"{name}/{part}" for part in _item(store, posixpath.join(folder, name), _MAX_NESTED_LEVELS))
    return found


def _handlers(store: Store, folder: str) -> Any:
    """Returns the listed handlers of the items; None if no list can be read."""
    try:
        about = read_checkpoint_metadata(store, folder) if is_file(store, posixpath.join(folder, CHECKPOINT)) else {}
        return about.get("item_handlers") if isinstance(about, Mapping) else ()
    except (TreeringError, OSError) as error:
        raise_if_momentary(error)
        return None


def _items(store: Store, folder: str, listed: Any) -> list[str]:
    """Returns the names of the items: those that are listed.

    Early releases of Orbax wrote no list, and steps of a manager are then named by numbers. The folders in any other
    folder without a list may be separate checkpoints.
    """
    folders = [name for name in store.list(folder) if is_folder(store, posixpath.join(folder, name))]
    if isinstance(listed, Mapping):
        return [name for name in folders if name in listed]
    steps = listed is None and STEP.fullmatch(os.path.basename(folder))
    nested = [name for name in folders if is_file(store, posixpath.join(folder, name, CHECKPOINT))]
    return folders if steps and not nested else []


def _item(store: Store, folder: str, levels: int) -> Iterator[str]:
    yield from _marks(store, folder)
    tree = list(_tree(store, folder))
    if tree:
        yield from tree
        return
    yield from state_files(store, folder)
    for name in store.list(folder):
        place = posixpath.join(folder, name)
        if name in VALUES:
            yield from _json(store, folder, name)
        elif levels and is_folder(store, place):
            yield from (f"{name}/{part}" for part in _item(store, place, levels - 1))


def _tree(store: Store, folder: str) -> Iterator[str]:
    """Yields the files of a tree, if the list of its leaves can be read."""
    named: set[str] = set()
    zarr3 = None
    found: list[str] = []
    try:
        if is_file(store, posixpath.join(folder, TREE)):
            about = read_metadata(store, folder)
            zarr3 = about.use_zarr3
            named |= {".".join(key.key for key in leaf.key_metadata) for leaf in about.tree_metadata.values()}
            found.append(TREE)
        data = (
            beginning(store, posixpath.join(folder, STATE), 1 << 16)
            if is_file(store, posixpath.join(folder, STATE))
            else b""
        )
        if next((kind for kind, _ in tokens(data)), None) == MAP:
            aggregated = read_aggregated(store, folder, None).entries
            named |= {name for entry in aggregated if (name := placeholder(entry)) is not None}
            found.append(STATE)
    except (TreeringError, OSError) as error:
        raise_if_momentary(error)
        return
    if not found:
        return
    yield from found
    for name in (SHARDINGS, STRINGS):
        yield from _json(store, folder, name)
    about_arrays = files_in(store, posixpath.join(folder, ARRAY_META))
    yield from (f"{ARRAY_META}/{name}" for name in about_arrays if ARRAY_META_FILE.fullmatch(name))
    yield from database_parts(store, folder)
    for name in named:
        if not os.path.isabs(name) and ".." not in name.split("/"):
            yield from parts_of(store, folder, name, "zarr3" if zarr3 else "zarr")


def _marks(store: Store, folder: str) -> Iterator[str]:
    if beginning(store, posixpath.join(folder, COMMITTED), 64).startswith(_COMMIT_PREFIXES):
        yield COMMITTED


def _json(store: Store, folder: str, name: str) -> Iterator[str]:
    """Yields the name of a file if it contains JSON."""
    path = posixpath.join(folder, name)
    try:
        if is_file(store, path):
            read_json(store, path)
            yield name
    except (TreeringError, OSError) as error:
        raise_if_momentary(error)
