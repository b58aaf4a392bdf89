"""Finds the items of a checkpoint of Orbax that a handler of a program wrote, and that Treering does not read."""

import posixpath

from ... import stores
from ..._restore.checkpoint import Checkpoint
from ...formats.orbax.schema import CHECKPOINT, UNFINISHED, read_checkpoint_metadata
from ...stores.file_io import read_file
from .. import item_restore
from .own_files import HANDLER

_OF_ORBAX = ("metrics", "descriptor")  # items that Orbax writes for itself


def own_items(path: str, ckpt: Checkpoint | None) -> dict[str, str | None]:
    """Returns the names of the items, and of the classes of their handlers if these are recorded.

    ckpt: the opened checkpoint, which has the other items; None if Treering reads none of them.
    """
    store = stores.get(path)
    if store.stat(posixpath.join(path, CHECKPOINT)) is None:
        return {}
    about = read_checkpoint_metadata(store, path)
    listed = about.get("item_handlers") if isinstance(about, dict) else None
    level = "" if ckpt is None else getattr(ckpt._source, "level", "")
    names = None if ckpt is None else item_restore.item_names(ckpt)
    if isinstance(listed, str) or (ckpt is not None and names is None and not level):
        return {}  # a tree directly in the folder
    handlers = listed if isinstance(listed, dict) else {}
    found: dict[str, str | None] = {}
    for name in store.list(path):
        if name in (*(names or ()), level, *_OF_ORBAX) or name.startswith(".") or UNFINISHED in name:
            continue
        there = store.stat(posixpath.join(path, name))
        if there is None or not there.is_folder:
            continue
        file = posixpath.join(path, name, HANDLER)
        if store.stat(file) is not None:
            found[name] = bytes(read_file(store, file)).decode()
        else:  # An object that saves itself needs no handler.
            of = str(handlers.get(name, ""))
            found[name] = None if not of or of.endswith(".StatefulCheckpointableHandler") else of
    return found
