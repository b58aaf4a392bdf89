"""Orbax: folders of items, most of them trees of zarr arrays, in plain files or in an OCDBT database.

What its `Checkpointer`s, its `CheckpointManager` and its version 1 write is read. Items are subtrees: ``state/…``,
``config/…``; items in JSON are values; the item ``metrics`` is the metrics. There is no level for an item where there
is no name that its user has chosen: for a tree that lies right in the folder (``StandardCheckpointer``), for the item
``default`` by itself (``CheckpointManager.save(step, args=StandardSave(tree))``), and for the item ``state`` (in early
releases ``pytree``) by itself in a checkpoint of version 1 (``save(path, tree)``). Trees are as Orbax keeps them:
tuples have become lists, named tuples and other classes dicts, and a node without children that is none of these
``None``. Folders without marks of their completion are no checkpoints.

What is written is a tree right in a folder, in an OCDBT database of zarr 2, for `StandardCheckpointer().restore` and
version 1's `load`.
"""

import json
import os
import re
import stat
from collections.abc import Collection, Sequence
from typing import Any

from ..errors import CorruptError, UnsafeError
from ..stores.disk import Disk, read_file
from . import Reader
from .msgpack import beginning

CHECKPOINT = "_CHECKPOINT_METADATA"
TREE = "_METADATA"
STATE = "checkpoint"  # what there was in its place in the first releases
PLACEHOLDER = "PLACEHOLDER://"  # text in it that stands for an array
COMMITTED = "commit_success.txt"
UNFINISHED = ".orbax-checkpoint-tmp"
_MOST = 16 << 20  # bytes of the file about the checkpoint, which is read to tell whether there is one
_STEP = re.compile(r"((?:.+_)?)([0-9]+)", re.DOTALL)


class Orbax:
    """See `treering.formats.Format`."""

    name = "orbax"
    suffixes = ()
    boxes = ("variable", "axis-metadata")

    def refuses(self, disk: Disk, path: str) -> str | None:
        try:
            there = disk.stat(path)
            if there is None:
                return "there is nothing"
            if not stat.S_ISDIR(there.st_mode):
                return "it is a file"
            if UNFINISHED in os.path.basename(path):
                return "it was never finished"
            if disk.stat(os.path.join(path, CHECKPOINT)) is not None:
                return None if _is_committed(disk, path) else "it was never committed"
            if tree_file(disk, path) is not None:
                return None
            # Until 2024 there was no file about the checkpoint as a whole.
            items = [name for name in disk.list(path) if tree_file(disk, os.path.join(path, name)) is not None]
        except OSError as error:
            return str(error)
        if not items:
            return f"it is a folder without {CHECKPOINT} and {TREE}"
        return "it is a folder of steps" if any(map(_STEP.fullmatch, items)) else None

    def open(self, disk: Disk, path: str) -> Reader:
        from .orbax_read import open_checkpoint

        found = _STEP.fullmatch(os.path.basename(path))
        return open_checkpoint(disk, path, int(found[2]) if found else None)

    def steps(self, disk: Disk, folder: str, names: Sequence[str]) -> dict[int, str]:
        if CHECKPOINT in names or TREE in names:  # the folder is a checkpoint itself
            return {}
        runs: dict[str, dict[int, str]] = {}
        for name in names:
            found = _STEP.fullmatch(name)
            if found and self.refuses(disk, os.path.join(folder, name)) is None:
                runs.setdefault(found[1], {}).setdefault(int(found[2]), name)
        # Steps of several prefixes are several runs, and it is not known which of them is meant.
        return runs.get("") or (next(iter(runs.values())) if len(runs) == 1 else {})

    def keeps(self, path: str, contents: Reader) -> Collection[str]:
        found = _STEP.fullmatch(os.path.basename(path))
        kept = ["metrics"]
        if isinstance(contents.metadata, dict):  # as Orbax has it
            kept.append("metadata")
        if found and int(found[2]) == contents.step:
            kept.append("step")
        return kept

    def write(self, disk: Disk, path: str, contents: Reader, *, overwrite: bool, **options: Any) -> int:
        from .orbax_write import write

        return write(disk, path, contents, options, overwrite=overwrite)


def tree_file(disk: Disk, folder: str) -> str | None:
    """The file in a folder that says which tree lies there, None where there is none."""
    if disk.stat(os.path.join(folder, TREE)) is not None:
        return TREE
    there = disk.stat(os.path.join(folder, STATE))
    if there is None or not stat.S_ISREG(there.st_mode):
        return None
    return STATE if PLACEHOLDER.encode() in beginning(disk, os.path.join(folder, STATE), 1 << 16) else None


def read_about(disk: Disk, path: str) -> Any:
    """What the file about the checkpoint as a whole says. Raises `CorruptError`."""
    file = os.path.join(path, CHECKPOINT)
    there = disk.stat(file)
    if there is not None and there.st_size > _MOST:
        raise UnsafeError(f"{file}: {there.st_size} bytes, which cannot be meant as a description of a checkpoint")
    return read_json(disk, file)


def read_json(disk: Disk, path: str) -> Any:
    """The contents of a JSON file, in which there may be NaN. Raises `CorruptError`."""
    try:
        return json.loads(read_file(disk, path))
    except FileNotFoundError:
        raise CorruptError(f"{path}: expected a file of JSON, found nothing") from None
    except RecursionError:
        raise UnsafeError(f"{path}: nested deeper than can be meant") from None
    except ValueError as error:
        raise CorruptError(f"{path}: expected JSON: {error}") from None


def _is_committed(disk: Disk, path: str) -> bool:
    """Whether a checkpoint is complete: where folders cannot be renamed, it has its name from the beginning on."""
    if disk.stat(os.path.join(path, COMMITTED)) is not None:
        return True
    try:
        about = read_about(disk, path)
    except CorruptError:
        return True  # which is found when it is opened
    begun_only = (
        isinstance(about, dict) and about.get("init_timestamp_nsecs") and not about.get("commit_timestamp_nsecs")
    )
    return not begun_only


FORMAT = Orbax()
