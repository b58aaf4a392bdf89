"""Opens a checkpoint of either format and finds its checkpointables."""

import os
import posixpath
from typing import Any, NamedTuple

from ... import stores
from ..._core.leaf_paths import join_names
from ..._core.source import check_not_left_out
from ..._restore.checkpoint import Checkpoint
from ..._run.open import open_checkpoint
from ...errors import NotFoundError, UnsupportedError
from ...formats.orbax.items import UNNAMED_ITEMS
from ...formats.orbax.schema import CHECKPOINT, UNFINISHED, deleted_item, read_checkpoint_metadata
from ...stores.file_io import read_file
from .. import items
from ..errors import InvalidLayoutError, NoCheckpointableError
from .context import Context
from .options import CheckpointLayout
from .registry import HANDLER, class_of_handler
from .saving import STATE

_TREE_NAMES = (*UNNAMED_ITEMS[True], *UNNAMED_ITEMS[False], "AUTO", None)  # names of a tree without a name


class ItemPart(NamedTuple):
    """A checkpointable. `tree` is its tree, or `files` are those that a handler wrote.

    In Orbax's format `directory` has the files of either: those of a handler may look like the files of a tree.
    saved_by: the name of the class of the handler.
    """

    tree: Checkpoint | None = None
    files: Checkpoint | None = None
    directory: str | None = None
    saved_by: str | None = None


class CheckpointContents:
    """The checkpointables of the checkpoint at a path, or of one that is open.

    Raises `InvalidLayoutError`, which is a `FileNotFoundError` and a `ValueError`, if there is no checkpoint.
    """

    def __init__(self, place: str | os.PathLike[str] | Checkpoint, context: Context):
        opened = place if isinstance(place, Checkpoint) else None
        self.path = stores.absolute_run(place.path if isinstance(place, Checkpoint) else place)
        safetensors = context.checkpoint_layout is CheckpointLayout.SAFETENSORS
        self.ckpt: Checkpoint | None = None
        self._folders: dict[str, str | None] = {}  # the items of Orbax's format, and the classes that wrote them
        try:
            if opened is None or safetensors:
                opened = open_checkpoint(self.path, format="safetensors" if safetensors else None)
            check_not_left_out(opened._source)
            self.ckpt = opened
        except NotFoundError as error:
            raise InvalidLayoutError(str(error)) from None
        except UnsupportedError as error:
            self._folders = item_folders(self.path, None)
            if not self._folders:
                raise InvalidLayoutError(str(error)) from error
        else:
            accepts_all = context.checkpoint_layout is not CheckpointLayout.ORBAX
            if self.ckpt.format not in ("treering", "orbax") and not accepts_all:
                raise InvalidLayoutError(
                    f"{self.path}: expected a checkpoint of Treering or Orbax, found {self.ckpt.format}; set "
                    "checkpoint_layout='auto' of the context"
                )
            if self.ckpt.step is not None and posixpath.dirname(self.ckpt.path) == self.path and not safetensors:
                raise InvalidLayoutError(f"{self.path}: expected a checkpoint, found a run; give the path of a step")
            self._folders = item_folders(self.path, self.ckpt) if self.ckpt.format == "orbax" else {}
        self._names = None if self.ckpt is None else items.item_names(self.ckpt)
        level = "" if self.ckpt is None else getattr(self.ckpt._source, "level", "")
        self._own = [name for name in self._folders if name not in (*(self._names or ()), level)]
        self._only = level or STATE  # the name of an only tree

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the checkpointables."""
        if self.ckpt is None:
            return tuple(self._own)
        if self._names is None:
            return (self._only, *self._own)
        return tuple(dict.fromkeys([*self._names, *self._own]))

    def part(self, name: str | None) -> ItemPart:
        """Returns a checkpointable. Raises `NoCheckpointableError`, which is a `KeyError`, if there is none."""
        if name in self._own:
            return self._typed(None, name)
        if self.ckpt is not None and self._names is None and name in (*_TREE_NAMES, *self.names):
            return self._typed(self.ckpt, self._only)
        if name is not None and name == deleted_item(stores.get(self.path), self.path):
            raise InvalidLayoutError(
                f"{self.path}: expected an item that stays, found {name}, whose deletion by Orbax is unfinished; "
                "delete it with Orbax to complete the deletion"
            )
        if self.ckpt is None or self._names is None or name not in self._names:
            raise NoCheckpointableError(f"{self.path}: expected {name!r}, found {join_names(self.names) or 'none'}")
        return self._typed(items.part_of(self.ckpt, name), name)

    def tree_name(self) -> str:
        """Returns the name of the tree that a load without a name takes: `state`, or the first one.

        Raises `InvalidLayoutError` if there is no tree.
        """
        for name in (STATE, *sorted(self.names)):
            if name in self.names and self.part(name).tree is not None:
                return name
        raise InvalidLayoutError(f"{self.path}: expected a tree, found {join_names(self.names)}")

    def _typed(self, part: Checkpoint | None, name: str) -> ItemPart:
        if part is None or not items.is_files(part):
            directory = posixpath.join(self.path, name) if name in self._folders else None
            return ItemPart(tree=part, directory=directory, saved_by=self._folders.get(name))
        return ItemPart(files=part, saved_by=class_of_handler({name: part[name] for name in part if name == HANDLER}))


def tree_part(contents: CheckpointContents, name: Any) -> Checkpoint:
    """Returns the tree of a name, or the only one. Raises `InvalidLayoutError` if there is none."""
    chosen = contents.tree_name() if name == "AUTO" else name
    found = contents.part(chosen).tree
    if found is None:
        raise InvalidLayoutError(f"{contents.path}: {chosen}: expected a tree, found the files of a handler")
    return found


_OF_ORBAX = ("metrics", "descriptor")  # items that Orbax writes for itself


def item_folders(path: str, ckpt: Checkpoint | None) -> dict[str, str | None]:
    """Returns the names of the items with a folder, and of the classes of their handlers if these are recorded.

    ckpt: the opened checkpoint; None if Treering reads none of its items.
    """
    store = stores.get(path)
    if store.stat(posixpath.join(path, CHECKPOINT)) is None:
        return {}
    about = read_checkpoint_metadata(store, path)
    listed = about.get("item_handlers") if isinstance(about, dict) else None
    deleted = deleted_item(store, path)  # Orbax 0.12.8 writes the name before it deletes one item of a checkpoint.
    level = "" if ckpt is None else getattr(ckpt._source, "level", "")
    names = None if ckpt is None else items.item_names(ckpt)
    if isinstance(listed, str) or (ckpt is not None and names is None and not level):
        return {}  # a tree directly in the folder
    handlers = listed if isinstance(listed, dict) else {}
    found: dict[str, str | None] = {}
    for name in store.list(path):
        if name in (deleted, *_OF_ORBAX) or name.startswith(".") or UNFINISHED in name:
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
