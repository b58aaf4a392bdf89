"""Writes Orbax: one tree in a folder or, with `composite=True`, an item for each key at the top of the tree.

A step whose folder has its number in its name is one of a `CheckpointManager`: the tree is then the item `default`.
"""

import json
import posixpath
import time
from collections.abc import Mapping
from typing import Any

from ..._core.boxes import full_box
from ..._core.calls import Call
from ..._core.layouts import Layout
from ..._core.skeleton import Node
from ..._core.source import COMPOSITE_V1, Source, item_names
from ...errors import MismatchError, UnsupportedError
from ...stores.sequential import file_of_new_folder
from ...stores.store import Store
from .._shared.case_folding import Folders
from .._shared.recognition import check_names
from .._zarr.folder import part_of_database
from .._zarr.leaves import chunks_of
from .._zarr.parallel_write import write_folder
from .._zarr.writer import Writer
from . import iterators
from .items import DEFAULT, METRICS, VALUES
from .items_write import Items, is_files, items_of
from .owned_files import NAMES, owned_files
from .schema import CHECKPOINT, COMMITTED, STEP, UNFINISHED
from .tree_write import add_arrays, leaves_of, problems_of, put, write_rest

_HANDLERS = "orbax.checkpoint._src.handlers"
_OF_TREES = f"{_HANDLERS}.standard_checkpoint_handler.StandardCheckpointHandler"
_OF_TREES_V1 = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
_OF_VALUES = f"{_HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler"


def write(
    store: Store,
    path: str,
    contents: Source,
    call: Call,
    layouts: Mapping[str, Layout],
    options: Mapping[str, Any],
    *,
    overwrite: bool,
) -> int:
    """Writes a folder and returns its size in bytes. Stores metrics and metadata where Orbax has those of a step."""
    if UNFINISHED in posixpath.basename(path):
        raise UnsupportedError(
            f"{path}: Orbax treats a folder with {UNFINISHED!r} in its name as unfinished; choose another name"
        )
    of_manager = is_step_of_manager(path, contents)
    if _is_composite(**options) or (of_manager and item_names(contents) is not None):
        items = items_of(contents)
    else:
        items = _only_tree(contents, of_manager=of_manager)
    if items.problems:
        raise UnsupportedError("\n".join(["format='orbax' cannot hold these leaves:", *items.problems]))
    root = contents.skeleton[0] if contents.skeleton else None
    of_trees = _OF_TREES_V1 if isinstance(root, Node) and root.name == COMPOSITE_V1 else _OF_TREES
    handlers = dict.fromkeys(items.trees, of_trees) | dict.fromkeys(items.values, _OF_VALUES)
    handlers |= dict.fromkeys(items.iterators, iterators.HANDLER)
    # A handler may have written a file of that name itself.
    own = [name for name, files in items.files.items() if COMMITTED in files]
    marks = [posixpath.join(name, COMMITTED) for name in {**handlers, **items.files, "": ""} if name not in own]
    if "" not in handlers:  # without composite=True, the user chooses no names
        check_names(path, [CHECKPOINT, *marks], "orbax")
    chunks = chunks_of(call, layouts, (leaf.entry for leaves in items.trees.values() for leaf in leaves))
    begun = time.time_ns()

    def begin(folder: str) -> None:
        folders = Folders(store, folder, path)
        for name in filter(None, {**handlers, **items.files}):
            folders.add(name)
            store.make_folders(posixpath.join(folder, name), [])

    def arrays(folder: str) -> list[Writer]:
        writers: list[Writer] = []
        for (
            name,
            leaves,
        ) in items.trees.items():  # one after another: each writer may hold the full limit of bytes in memory
            with Writer(store, _within(folder, name), driver="zarr", ocdbt=True, call=call) as writer:
                add_arrays(writer, leaves, contents, chunks)
            writers.append(writer)
        return writers

    def rest(folder: str) -> None:
        for name, leaves in items.trees.items():
            write_rest(store, _within(folder, name), leaves, contents, chunks)
        for name, files in items.files.items():
            for file, entry in files.items():
                place = posixpath.join(folder, name, file)
                store.make_folders(posixpath.dirname(place), [])
                (content,) = contents.read([(entry, full_box(entry.shape))])
                with file_of_new_folder(store, place) as opened:
                    opened.write(content.tobytes())
        for name, entry in items.iterators.items():
            for file, content in iterators.files_of(entry, call.count).items():
                with file_of_new_folder(store, posixpath.join(folder, name, file)) as opened:
                    opened.write(content)
        for name, value in items.values.items():
            put(store, posixpath.join(folder, name, METRICS if name == METRICS else VALUES[0]), json.dumps(value))
        # The policies of a manager need the time of the commit of each step.
        committed = int(contents.created.timestamp() * 1e9) if of_manager and contents.created else time.time_ns()
        about = _checkpoint(contents, handlers.get("", handlers), min(begun, committed), committed)
        put(store, posixpath.join(folder, CHECKPOINT), about)
        for mark in marks:
            put(store, posixpath.join(folder, mark), "committed")

    names = {*NAMES, *handlers, *items.files, *(part_of_database("", n) for n in range(call.count) if call.count > 1)}
    return write_folder(
        store, path, call, arrays, rest, begin=begin, overwrite=overwrite, owned=owned_files, names=names
    )


def _is_composite(*, composite: Any = False, **unknown: Any) -> bool:
    """Checks the options and returns `composite`. Raises `MismatchError` for all others."""
    if unknown:
        raise MismatchError(f"format='orbax': expected no option except composite=, found {', '.join(unknown)}")
    if type(composite) is not bool:
        raise MismatchError(
            f"composite={composite!r:.100}: expected True, which makes an item of each key at the top of the tree, or "
            "False; rules choose and name the keys"
        )
    return composite


def is_step_of_manager(path: str, contents: Source) -> bool:
    """Returns True if a folder has the name that a `CheckpointManager` gives to the step that the contents are."""
    found = STEP.fullmatch(posixpath.basename(path))
    return found is not None and int(found[2]) == contents.step


def _only_tree(contents: Source, *, of_manager: bool) -> Items:
    """Returns the entire tree as the only item: `default` with the metrics, or directly in the folder."""
    assert contents.skeleton is not None
    leaves = list(leaves_of(contents.skeleton, contents.entries.values()))
    if is_files(contents.skeleton):
        return Items({}, {}, ["  (root): the files of a handler; make them an item among several"])
    values = {METRICS: dict(contents.metrics)} if of_manager and contents.metrics else {}
    return Items({DEFAULT if of_manager else "": leaves}, values, list(problems_of(leaves)))


def _within(folder: str, name: str) -> str:
    return posixpath.join(folder, name) if name else folder


def _checkpoint(contents: Source, handlers: Mapping[str, str] | str, begun: int, committed: int) -> Any:
    return {
        "item_handlers": handlers,
        "metrics": dict(contents.metrics),
        "performance_metrics": {},
        "init_timestamp_nsecs": begun,
        "commit_timestamp_nsecs": committed,
        "custom_metadata": contents.metadata if isinstance(contents.metadata, dict) else {},
    }
