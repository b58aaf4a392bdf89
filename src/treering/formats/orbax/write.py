"""Writes Orbax: one tree in a folder or, with `composite=True`, an item for each key at the top of the tree.

A step whose folder has its number in its name is one of a `CheckpointManager`: the tree is then the item `default`.
"""

import itertools
import json
import posixpath
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..._core.boxes import full_box
from ..._core.calls import Call
from ..._core.describe import rename_code
from ..._core.entries import ArrayEntry, Entry, IteratorEntry, ValueEntry
from ..._core.layouts import Layout
from ..._core.leaf_paths import key_text, split
from ..._core.skeleton import Node, Skeleton, build, subtree_end
from ..._core.source import COMPOSITE, COMPOSITE_V1, HANDLER_FILES, JSON_ITEM, Source, item_names
from ..._core.values import encode
from ...errors import MismatchError, UnsupportedError
from ...stores.sequential import file_of_new_folder
from ...stores.store import Store
from .._shared.recognition import check_names
from .._shared.safety import problems_of_names
from .._zarr.folder import part_of_database
from .._zarr.leaves import chunks_of
from .._zarr.parallel_write import Folders, write_folder
from .._zarr.writer import ZarrWriter
from . import iterators
from .items import DEFAULT, METRICS, VALUES
from .owned_files import NAMES, owned_files
from .schema import CHECKPOINT, COMMITTED, STEP, UNFINISHED
from .tree_write import WrittenLeaf, add_arrays, leaves_of, problems_of, put, write_rest

_JSON = ("bool", "int", "float", "str", "none")  # types of leaves
_MAX_JSON_LEVELS = 200  # levels that every reader of JSON follows
_MAX_INT_BITS = 12_000  # bits; Python converts integers of at most 4,300 decimal digits to and from text
_MAX_NAME_BYTES = 255  # bytes of a folder's name
_HANDLERS = "orbax.checkpoint._src.handlers"
_OF_TREES = f"{_HANDLERS}.standard_checkpoint_handler.StandardCheckpointHandler"
_OF_TREES_V1 = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
_OF_VALUES = f"{_HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler"


class WrittenItems(NamedTuple):
    """Holds the trees and the values in JSON, by item, and a line for each leaf or key that Orbax cannot hold.

    The name "" stands for a tree directly in the folder. `files` are the arrays of bytes that become files of an item.
    `iterators` are the items that are states of iterators.
    """

    trees: Mapping[str, Sequence[WrittenLeaf]]
    values: Mapping[str, Any]
    problems: Sequence[str]
    files: Mapping[str, Mapping[str, ArrayEntry]] = {}
    iterators: Mapping[str, IteratorEntry] = {}


def items_of(contents: Source) -> WrittenItems:
    """Divides a tree into items. An item with numbers or text and no arrays is JSON, as `JsonSave` writes it.

    An iterator of Grain is an item, as Grain's `CheckpointSave` writes it.

    If the tree is a `COMPOSITE`, an item of the class `JSON_ITEM` is JSON, and one that is a number, text or None. In
    version 1, a leaf is a tree.

    The metrics become an item, too, because a `CheckpointManager` looks for them there.
    """
    skeleton = contents.skeleton
    assert skeleton is not None
    if not isinstance(skeleton[0], Node) or not skeleton[0].names():
        return WrittenItems(
            {}, {}, ["  (root): composite=True makes an item of each key of a dict; found no keys at the top"]
        )
    trees: dict[str, Sequence[WrittenLeaf]] = {}
    values: dict[str, Any] = {}
    files: dict[str, Mapping[str, ArrayEntry]] = {}
    states: dict[str, IteratorEntry] = {}
    problems: list[str] = []
    version_1 = skeleton[0].name == COMPOSITE_V1
    marked = version_1 or skeleton[0].name == COMPOSITE
    for name, part, entries in _divided(skeleton, skeleton[0], contents.entries.values()):
        leaves = list(leaves_of(part, entries))
        plain = all(entry.type in _JSON for entry in entries) and any(entry.type != "none" for entry in entries)
        is_leaf = not isinstance(part[0], Node)
        is_value = is_leaf and not version_1 and all(entry.type in _JSON for entry in entries)
        is_json = _is_of(part, JSON_ITEM) or is_value if marked else plain
        state = entries[0] if entries and is_leaf else None
        is_state = isinstance(state, IteratorEntry)
        if reason := _refused(name, part, is_one=is_state or (marked and is_json) or (version_1 and is_leaf)):
            problems.append(f"  {name or repr(name)}: {reason}")
        elif isinstance(state, IteratorEntry):
            states[name] = state
            problems += [f"  {name}: {reason}"] if (reason := iterators.refused(state)) else []
        elif is_files(part):
            files[name] = {leaf.keys[0][0]: leaf.entry for leaf in leaves if isinstance(leaf.entry, ArrayEntry)}
            problems += _problems_of_files(leaves if entries else [], name)
        elif is_json:
            values[name] = _value(part, entries)
            problems += _problems_of_values(leaves, name)
        else:
            trees[name] = leaves
            problems += problems_of(leaves, name)
    if contents.metrics:
        values[METRICS] = dict(contents.metrics)
    return WrittenItems(trees, values, problems, files, states)


def is_files(skeleton: Skeleton) -> bool:
    """Returns True for an item that consists of the files of a handler."""
    return _is_of(skeleton, HANDLER_FILES)


def _is_of(skeleton: Skeleton, name: str) -> bool:
    return isinstance(skeleton[0], Node) and skeleton[0].name == name


def _divided(skeleton: Skeleton, top: Node, entries: Iterable[Entry]) -> Iterator[tuple[str, Skeleton, list[Entry]]]:
    """Yields the keys at the top of a tree, each with the subtree below it."""
    rest, begin = iter(entries), 1
    for key in top.children():
        part = skeleton[begin : subtree_end(skeleton, begin)]
        begin += len(part)
        count = sum(not isinstance(node, Node) for node in part)
        yield split(key_text(key))[0], part, list(itertools.islice(rest, count))


def _refused(name: str, part: Skeleton, *, is_one: bool) -> str | None:
    """Returns the reason why the subtree below a key cannot be an item; None if it can.

    is_one: True if a leaf is an item, because it is the state of an iterator, marked as JSON, or a tree of version 1.
    """
    if not is_one and not isinstance(part[0], Node):
        own = rename_code(name, f"group/{name}")
        return f"a leaf, and items are folders of leaves; move it into one: {own}"
    if not is_one and len(part) == 1 and not is_files(part):
        return "an empty item, which Orbax refuses; leave it out"
    if name in (*NAMES, METRICS) or UNFINISHED in name:
        return "Orbax uses this name itself; rename it with treering.rules.rename"
    if name in ("", ".", "..") or {*name} & {*"/\\\0"} or len(name.encode()) > _MAX_NAME_BYTES:
        return f"items are folders, whose names have {_MAX_NAME_BYTES} bytes at most and no slashes; rename it"
    return None


def _problems_of_files(leaves: Sequence[WrittenLeaf], at: str) -> Iterator[str]:
    """Yields a line for each leaf that cannot be a file, such as one whose name leads out of the item's folder."""
    for leaf in leaves:
        path, entry = "/".join(key for key, _ in leaf.keys), leaf.entry
        if len(leaf.keys) != 1 or not isinstance(entry, ArrayEntry) or (entry.dtype, len(entry.shape)) != ("uint8", 1):
            yield f"  {at}/{path}: expected the bytes of a handler's file, which are a one-dimensional array of uint8"
    for name, reason in problems_of_names(leaf.keys[0][0] for leaf in leaves):
        yield f"  {at}/{name}: {reason}"


def _problems_of_values(leaves: Iterable[WrittenLeaf], at: str) -> Iterator[str]:
    """Yields a line for each value that JSON would not return unchanged."""
    for leaf in leaves:
        path = "/".join([at, *(key for key, _ in leaf.keys)])
        value = leaf.entry.decode() if isinstance(leaf.entry, ValueEntry) else None
        if len(leaf.keys) > _MAX_JSON_LEVELS:
            yield f"  {path}: it is more than {_MAX_JSON_LEVELS} levels deep, which readers of JSON do not follow"
        elif type(value) is int and value.bit_length() > _MAX_INT_BITS:
            yield f"  {path}: an int of more than {_MAX_INT_BITS} bits"
        elif value != value and encode(value)[1] != "nan":
            yield f"  {path}: a NaN with a payload, which JSON cannot hold"


def _value(part: Skeleton, entries: Iterable[Entry]) -> Any:
    """Builds dicts and lists of values, with keys as they are in paths."""
    plain = [_plain(node) if isinstance(node, Node) else node for node in part]
    return build(plain, [entry.decode() for entry in entries if isinstance(entry, ValueEntry)])


def _plain(node: Node) -> Node:
    if isinstance(node.keys, int):
        return Node("list", "", node.keys)
    return Node("dict", "", [split(key_text(key))[0] for key in node.children()])


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

    def arrays(folder: str) -> list[ZarrWriter]:
        writers: list[ZarrWriter] = []
        for (
            name,
            leaves,
        ) in items.trees.items():  # one after another: each writer may hold the full limit of bytes in memory
            with ZarrWriter(store, _within(folder, name), driver="zarr", ocdbt=True, call=call) as writer:
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


def _only_tree(contents: Source, *, of_manager: bool) -> WrittenItems:
    """Returns the entire tree as the only item: `default` with the metrics, or directly in the folder."""
    assert contents.skeleton is not None
    leaves = list(leaves_of(contents.skeleton, contents.entries.values()))
    if is_files(contents.skeleton):
        return WrittenItems({}, {}, ["  (root): the files of a handler; make them an item among several"])
    values = {METRICS: dict(contents.metrics)} if of_manager and contents.metrics else {}
    return WrittenItems({DEFAULT if of_manager else "": leaves}, values, list(problems_of(leaves)))


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
