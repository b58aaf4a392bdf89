"""Orbax: folders of items, most of them trees of zarr arrays, in plain files or in an OCDBT database.

Reads what Orbax's ``Checkpointer``, ``CheckpointManager`` and version 1 write. Items are subtrees: ``state/…``,
``config/…``; items in JSON are values; those of Grain's iterators are leaves; the item ``metrics`` is the metrics. An
item has no level where the user has chosen no name for it: for a tree that lies right in the folder
(``StandardCheckpointer``), for the item ``default`` by itself (``CheckpointManager.save(step,
args=StandardSave(tree))``), and for the item ``state`` (in early releases ``pytree``) by itself in a checkpoint of
version 1 (``save(path, tree)``). Trees are as Orbax keeps them: tuples have become lists, named tuples and other
classes dicts, and a node without children that is none of these ``None``. Folders without marks of their completion
are no checkpoints.

Writes a tree right in a folder, in an OCDBT database of zarr 2, for ``StandardCheckpointer().restore`` and version 1's
``load``. With the option ``composite=True`` it writes an item for each key at the top of the tree, for the
``args.Composite`` of a ``CheckpointManager`` and version 1's ``load_checkpointables``: a tree or, where that holds
numbers or text and no arrays, values in JSON.
"""

import errno
import os
import posixpath
from collections.abc import Callable, Collection, Sequence

from ..._core.source import Source
from ...errors import CorruptError
from ...stores.read_errors import refusal
from ...stores.store import Store
from ...stores.whole_files import is_file
from .. import is_step
from .._zarr.joint_format import ZarrFolders
from .schema import (
    ABOUT_ARRAY,
    ABOUT_ARRAYS,
    CHECKPOINT,
    COMMIT_TIME,
    COMMITTED,
    DATABASE,
    SHARDINGS,
    STEP,
    TREE,
    UNFINISHED,
    read_about,
    tree_file,
)


class Orbax(ZarrFolders):
    """See `treering.formats.Format`."""

    name = "orbax"
    suffixes = ()
    boxes = ("variable", "axis-metadata")

    def refuses(self, store: Store, path: str) -> str | None:
        try:
            there = store.stat(path)
            if there is None:
                return "there is nothing"
            if not there.is_folder:
                return "it is a file"
            if UNFINISHED in os.path.basename(path):
                return "it was never finished"
            if is_file(store, posixpath.join(path, CHECKPOINT)):
                return None if _is_committed(store, path) else "it was never committed"
            if _is_tree(store, path):
                return None
            # Until 2024 there was no file about the checkpoint as a whole.
            names = store.list(path)
            checkpoints = [name for name in names if is_file(store, posixpath.join(path, name, CHECKPOINT))]
            items = [name for name in names if _is_tree(store, posixpath.join(path, name))]
        except OSError as error:
            return refusal(error, path)
        if any(map(STEP.fullmatch, [*checkpoints, *items])):
            return "it is a folder of steps"
        if checkpoints:  # an item of one has no such file
            return f"it is a folder of checkpoints; open the one that is meant: {', '.join(checkpoints)}"
        return None if items else f"it is a folder without {CHECKPOINT} and {TREE}"

    def open(self, store: Store, path: str) -> Source:
        from .read import open_checkpoint

        if reason := self.refuses(store, path):
            if store.stat(path) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            raise CorruptError(f"{path}: expected a checkpoint of Orbax: {reason}")
        found = STEP.fullmatch(os.path.basename(path))
        return open_checkpoint(store, path, int(found[2]) if found else None)

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        if CHECKPOINT in names or TREE in names:  # the folder is a checkpoint itself
            return {}
        runs: dict[str, dict[int, str]] = {}
        for name in names:
            found = STEP.fullmatch(name)
            if found and is_step(self, store, posixpath.join(folder, name)):
                runs.setdefault(found[1], {}).setdefault(int(found[2]), name)
        # Steps of several prefixes are several runs, and it is not known which of them is meant.
        return runs.get("") or (next(iter(runs.values())) if len(runs) == 1 else {})

    def damaged_steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        marks = (COMMITTED, DATABASE) if store.has_folders else (COMMITTED,)  # where a name alone commits nothing
        steps: dict[int, str] = {}
        named = [name for name in names if STEP.fullmatch(name)]
        for name in named if named and self.refuses(store, folder) is not None else ():  # or they are parts of it
            found, path = STEP.fullmatch(name), posixpath.join(folder, name)
            if found and not is_file(store, posixpath.join(path, CHECKPOINT)):  # or it was never committed
                committed = any(is_file(store, posixpath.join(path, mark)) for mark in marks)
                if committed and self.refuses(store, path) is not None:
                    steps.setdefault(int(found[2]), name)
        return steps

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        found = STEP.fullmatch(os.path.basename(path))
        kept = ["metrics"]
        if isinstance(contents.metadata, dict):  # as Orbax has it
            kept.append("metadata")
        if found and int(found[2]) == contents.step:
            kept.append("step")
        return kept

    def _writer(self) -> Callable[..., int]:
        from .write import write

        return write


def _is_committed(store: Store, path: str) -> bool:
    """Whether a checkpoint is complete: where folders cannot be renamed, it has its name from the beginning on."""
    if store.stat(posixpath.join(path, COMMITTED)) is not None:
        return True
    try:
        about = read_about(store, path)
    except CorruptError:
        return True  # opening it raises
    # The time of the commit is null until then. It may be left out altogether, for Orbax goes by the folder's name.
    begun_only = isinstance(about, dict) and about.get("init_timestamp_nsecs") and COMMIT_TIME in about
    return not begun_only or bool(about[COMMIT_TIME])


def _is_tree(store: Store, folder: str) -> bool:
    """Whether a tree lies in a folder, even if the list of its leaves is gone."""
    about = posixpath.join(folder, ABOUT_ARRAYS)
    return (
        tree_file(store, folder) is not None
        or is_file(store, posixpath.join(folder, SHARDINGS))
        or any(
            ABOUT_ARRAY.fullmatch(name) and is_file(store, posixpath.join(about, name)) for name in store.list(about)
        )
    )


FORMAT = Orbax()
