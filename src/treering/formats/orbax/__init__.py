"""The format Orbax: folders of items, most of them trees of zarr arrays, in plain files or in an OCDBT database.

Treering reads what Orbax's ``Checkpointer``, ``CheckpointManager`` and version 1 write. Items are subtrees:
``state/…``, ``config/…``. Items in JSON are values, and those of Grain's iterators are leaves. The item ``metrics``
is the metrics. An item that the user did not name has no level of its own:

- a tree stored directly in the folder (``StandardCheckpointer``);
- the only item ``default`` (``CheckpointManager.save(step, args=StandardSave(tree))``);
- the only item ``state``, in early releases ``pytree``, of version 1 (``save(path, tree)``).

Trees have the containers that Orbax records: tuples have become lists, named tuples and other classes dicts, and any
other node without children ``None``. A folder without a mark of completion is not a checkpoint.

Treering writes a tree directly into a folder, in an OCDBT database of zarr 2, for ``StandardCheckpointer().restore``
and version 1's ``load``. A step whose number is the name of its folder (``30``, ``ckpt_30``) becomes one of a
``CheckpointManager``: the tree is its item ``default``, and the items of a step of the adapter stay items. With the
option ``composite=True``, Treering writes one item for each key at the top of the tree, for the ``args.Composite`` of a
``CheckpointManager`` and version 1's ``load_checkpointables``. An item is a tree or, if it holds numbers or text and no
arrays, values in JSON. An iterator of Grain is an item, too.
"""

import errno
import os
import posixpath
import re
from collections.abc import Callable, Collection, Sequence

from ..._core.leaf_paths import join_names
from ..._core.source import Source
from ...errors import CorruptError
from ...stores.file_io import is_file
from ...stores.read_errors import refusal
from ...stores.store import Store
from .. import is_step
from .._shared.format_parts import ZarrFolders
from .schema import (
    ARRAY_META,
    ARRAY_META_FILE,
    CHECKPOINT,
    COMMIT_TIME,
    COMMITTED,
    DATABASE,
    SHARDINGS,
    STEP,
    TREE,
    UNFINISHED,
    read_checkpoint_metadata,
    tree_file,
)

_DEFAULT_PREFIXES = ("", "checkpoint_")  # of Orbax, and of Flax, which saves through Orbax


class Orbax(ZarrFolders):
    """See `treering.formats.Format`."""

    name = "orbax"
    boxes = ("variable", "axis-metadata")
    holds_iterators = True

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
            # Until 2024, Orbax wrote no file about the entire checkpoint.
            names = store.list(path)
            checkpoints = [name for name in names if is_file(store, posixpath.join(path, name, CHECKPOINT))]
            items = [name for name in names if _is_tree(store, posixpath.join(path, name))]
        except OSError as error:
            return refusal(error, path)
        if steps := [found for name in (*checkpoints, *items) if (found := STEP.fullmatch(name))]:
            return _several_runs_error(path, steps) or "it is a folder of steps"
        if checkpoints:  # an item of a checkpoint has no such file
            return f"it is a folder of checkpoints; open one of them by its own path: {', '.join(checkpoints)}"
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
        # Steps of several prefixes belong to several runs, and nothing says which of them the user means.
        of_defaults = next((runs[prefix] for prefix in _DEFAULT_PREFIXES if prefix in runs), None)
        return of_defaults or (next(iter(runs.values())) if len(runs) == 1 else {})

    def damaged_steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        # On a disk, Orbax commits by renaming the folder. In a bucket, the name alone commits nothing.
        marks = (COMMITTED, DATABASE) if store.has_folders else (COMMITTED,)
        steps: dict[int, str] = {}
        named = [name for name in names if STEP.fullmatch(name)]
        # In a folder that is a checkpoint, such names are parts of it.
        for name in named if named and self.refuses(store, folder) is not None else ():
            found, path = STEP.fullmatch(name), posixpath.join(folder, name)
            if found and not is_file(store, posixpath.join(path, CHECKPOINT)):  # otherwise it was never committed
                committed = any(is_file(store, posixpath.join(path, mark)) for mark in marks)
                if committed and self.refuses(store, path) is not None:
                    steps.setdefault(int(found[2]), name)
        return steps

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        found = STEP.fullmatch(os.path.basename(path))
        kept = ["metrics"]
        if isinstance(contents.metadata, dict):  # Orbax can only store a dict
            kept.append("metadata")
        if found and int(found[2]) == contents.step:
            kept.append("step")
        return kept

    def _writer(self) -> Callable[..., int]:
        from .write import write

        return write


def _several_runs_error(folder: str, steps: Sequence[re.Match[str]]) -> str | None:
    """Returns the reason why a folder with steps of several runs is no run; None if the run is clear."""
    latest: dict[str, re.Match[str]] = {}
    for step in sorted(steps, key=lambda step: int(step[2])):
        latest[step[1]] = step
    if len(latest) == 1 or any(prefix in latest for prefix in _DEFAULT_PREFIXES):
        return None
    paths = tuple(posixpath.join(folder, step[0]) for _, step in sorted(latest.items()))
    return (
        f"it has steps of {len(latest)} prefixes, perhaps of different runs: "
        f"{join_names(tuple(map(repr, sorted(latest))))}; open one step by its path ({join_names(paths)}), or give "
        "each run its own folder"
    )


def _is_committed(store: Store, path: str) -> bool:
    """Returns True if a checkpoint is complete. In a bucket, it has its final name before that."""
    if store.stat(posixpath.join(path, COMMITTED)) is not None:
        return True
    try:
        about = read_checkpoint_metadata(store, path)
    except CorruptError:
        return True  # opening the checkpoint raises the error
    # The time of the commit is null until then. It may be missing, because Orbax normally goes by the folder's name.
    begun_only = isinstance(about, dict) and about.get("init_timestamp_nsecs") and COMMIT_TIME in about
    return not begun_only or bool(about[COMMIT_TIME])


def _is_tree(store: Store, folder: str) -> bool:
    """Returns True if a folder contains a tree, even if the list of its leaves is gone."""
    about = posixpath.join(folder, ARRAY_META)
    return (
        tree_file(store, folder) is not None
        or is_file(store, posixpath.join(folder, SHARDINGS))
        or any(
            ARRAY_META_FILE.fullmatch(name) and is_file(store, posixpath.join(about, name))
            for name in store.list(about)
        )
    )


FORMAT = Orbax()
