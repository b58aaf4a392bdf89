"""Reads the items of an Orbax checkpoint: trees of arrays, values in JSON, and states of data iterators."""

import logging
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..._core.entries import ArrayEntry, Entry, LostEntry, ValueEntry, check_readable
from ..._core.leaf_paths import join, key_text
from ..._core.skeleton import LEAF, Node
from ..._core.values import encode
from ...errors import CorruptError, TreeringError, UnsafeError
from ...stores.file_io import files_in, is_file
from ...stores.store import Store
from .._shared import data_iterators as _left_out
from . import iterators
from .schema import ARRAY_META, COMMITTED, STATE, TREE, UNFINISHED, has_arrays, read_json, tree_file
from .tree import MAX_LEVELS, OrbaxTree, read_remnant, read_state, read_tree

VALUES = ("metadata", "data.json", "metrics")  # the files of items in JSON
METRICS = "metrics"
DEFAULT = "default"  # the only item of a step of a manager
UNNAMED_ITEMS = {  # Orbax's names of an only item; True: version 1, since 0.12 and before
    False: (DEFAULT,),
    True: ("state", "pytree"),
}
_ARRAY = "checkpoint"  # the name of an array that is an item, within the item's folder
_KEY_FILE, _KEY_METADATA = (
    f"jax_random_key/{_ARRAY}",
    "jax_random_key_metadata/typed",
)  # the same for a PRNG key that is an item
_MAX_NESTED_LEVELS = 2  # levels of items that consist of items
_INTERNAL_HANDLER = "DescriptorHandler"  # of an item that Orbax writes itself; only Google's release can read it
_JSON_HANDLERS = ("JsonCheckpointHandler", "JsonHandler")
_TREE_HANDLERS = (
    "PyTreeCheckpointHandler",
    "StandardCheckpointHandler",
    "BasePyTreeCheckpointHandler",
    "PyTreeHandler",
    "ArrayCheckpointHandler",
    "JaxRandomKeyCheckpointHandler",
)
_log = logging.getLogger("treering")


class Items(NamedTuple):
    """Holds the tree of all items and the metrics.

    `damage` says why metrics that should exist are missing. `level` is the name of an only item. `left_out` describes
    the items that Treering cannot read. `names` are those of the items, None if the checkpoint is one tree.
    """

    tree: OrbaxTree
    metrics: Mapping[str, float]
    damage: str | None = None
    level: str = ""
    left_out: Sequence[str] = ()
    names: tuple[str, ...] | None = None


def read_items(store: Store, path: str, handlers: Mapping[str, str], deleted: Any, *, version_1: bool) -> Items:
    """Reads the items of a folder. `handlers` are those that the metadata lists; other folders are read too.
    `deleted` is the item that Orbax is deleting, which is not read.

    Damaged items become leaves that cannot be read. Raises `CorruptError` if all items are damaged.
    """
    names = [name for name in _folders(store, path) if name != deleted]
    expected = [name for name, handler in handlers.items() if name != deleted and handler != _INTERNAL_HANDLER]
    metrics, damage = _read_metrics(store, path, handlers) if METRICS in (*names, *expected) else (None, None)
    if metrics is not None or damage:
        names = [name for name in names if name != METRICS]
        expected = [name for name in expected if name != METRICS]
    if damage:
        _log.warning("%s: opened without metrics: %s", path, damage)
    if (
        not names and not expected and (tree := _read_values(store, path, None))
    ):  # values directly in the folder, like a tree
        return Items(tree, metrics or {}, damage)
    gone = [name for name in expected if name not in names]
    left_out: list[str] = []
    if len(names) == 1 and names[0] in UNNAMED_ITEMS[version_1] and not gone:
        tree = _read_item(store, posixpath.join(path, names[0]), None, handlers.get(names[0]), left_out)
        if tree is not None:
            return Items(tree, metrics or {}, damage, names[0], left_out)
        left_out.clear()  # the loop below reads the item again, by its name
    trees: dict[str, OrbaxTree] = {}
    for name in names:
        at = key_text(name)
        try:
            tree = _read_item(store, posixpath.join(path, name), at, handlers.get(name), left_out)
        except UnsafeError:
            raise
        except CorruptError as error:
            tree = OrbaxTree.lost(at, str(error))
        if tree is not None:
            trees[name] = tree
    for name in gone:
        trees[name] = OrbaxTree.lost(key_text(name), f"{path}: expected the item {name!r}, found no folder of it")
    if left_out and not trees:  # The step counts, because handlers of a program can restore it.
        level = names[0] if names[0] in UNNAMED_ITEMS[version_1] and len(names) == 1 else ""
        return Items(_merge_trees({}), metrics or {}, damage, level, left_out, None if level else ())
    made = _merge_trees({name: trees[name] for name in sorted(trees)})
    if all(isinstance(entry, LostEntry) for entry in made.entries):
        check_readable(made.entries)
    return Items(made, metrics or {}, damage, "", left_out, tuple(sorted(trees)))


def read_tree_of(store: Store, path: str, at: str | None) -> OrbaxTree | None:
    """Reads the tree of arrays in a folder, placed at a path or (None) as the root; None if the folder has none."""
    file = tree_file(store, path)
    if file == TREE:
        return read_tree(store, path, at)
    if file == STATE:
        leaves = read_state(store, path, at)
        return OrbaxTree(leaves.entries, leaves.arrays, list(leaves.skeleton))
    if not has_arrays(store, path):
        return None
    lacks = "" if store.list(posixpath.join(path, ARRAY_META)) else f", PRNG keys are plain without {ARRAY_META}"
    _log.warning("%s: its file %s is gone; leaves are named like their arrays%s", path, TREE, lacks)
    return read_remnant(store, path, at)


def numbers(value: Any) -> dict[str, float] | None:
    """Returns a map of numbers as floats; None for any other value."""
    if not isinstance(value, dict) or not all(type(number) in (int, float) for number in value.values()):
        return None
    try:
        return {name: float(number) for name, number in value.items()}
    except OverflowError:
        return None


def _read_metrics(
    store: Store, path: str, handlers: Mapping[str, str]
) -> tuple[Mapping[str, float] | None, str | None]:
    """Reads the metrics.

    Returns (metrics, None), (None, None) if `metrics` is an ordinary item, or (None, the reason) if they are damaged.
    """
    folder = posixpath.join(path, METRICS)
    file = _value_file(store, folder)
    try:
        if file is not None:
            return numbers(read_json(store, file)), None
        if handlers.get(METRICS) in _JSON_HANDLERS:
            raise CorruptError(f"{folder}: expected the metrics in JSON, found nothing")
    except UnsafeError:
        raise
    except CorruptError as error:
        return None, str(error)
    return None, None


def _read_item(
    store: Store, path: str, at: str | None, handler: str | None, left_out: list[str], levels: int = _MAX_NESTED_LEVELS
) -> OrbaxTree | None:
    """Reads an item as the tree at a path. For an unknown kind, returns None and adds its description to `left_out`.

    Raises `CorruptError`.
    """
    tree = read_tree_of(store, path, at)
    if tree is not None:
        return _with_saved_kinds(tree, path, at, handler)
    tree = _read_values(store, path, at)
    if tree is not None:
        return tree
    found: dict[str, OrbaxTree] = {}
    unknown: list[str] = []
    for name in _folders(store, path) if levels else ():
        below = join(at or "", key_text(name), root=at is None)
        tree = _read_item(store, posixpath.join(path, name), below, None, unknown, levels - 1)
        if tree is not None:
            found[name] = tree
    if found:
        left_out += unknown
        return _with_saved_kinds(_merge_trees(found), path, at, handler)
    if handler in _TREE_HANDLERS:
        raise CorruptError(f"{posixpath.join(path, TREE)}: expected the list of the tree's leaves, found nothing")
    if handler in _JSON_HANDLERS:
        raise CorruptError(f"{path}: expected a file of JSON, found nothing")
    files = [name for name in files_in(store, path) if name != COMMITTED]
    if handler in iterators.HANDLERS and not files:  # a class of this name may be another library's
        raise CorruptError(f"{path}: expected the states of an iterator, process_0-of-1.json and so on, found nothing")
    left_out.append(f"{at or posixpath.basename(path)} ({_left_out.describe(store, path, files)})")
    return None


def _read_values(store: Store, path: str, at: str | None) -> OrbaxTree | None:
    """Reads values in JSON, or the states of an iterator, as the tree at a path; None if the folder has neither."""
    file = _value_file(store, path)
    if file is not None:
        return _tree_of_values(read_json(store, file), at, file)
    states = iterators.read_states(store, path, at)
    return None if states is None else OrbaxTree([states], {}, [LEAF])


def _with_saved_kinds(tree: OrbaxTree, folder: str, at: str | None, handler: str | None) -> OrbaxTree:
    """Returns an item, without the names that its handler added if it was one array or one PRNG key."""
    array, key, typed = (join(at or "", name, root=at is None) for name in (_ARRAY, _KEY_FILE, _KEY_METADATA))
    found = {entry.path: entry for entry in tree.entries}
    path = {"ArrayCheckpointHandler": array, "JaxRandomKeyCheckpointHandler": key}.get(handler or "", "")
    if path and path not in found:
        raise CorruptError(f"{folder}: expected the array {path!r} in it, found {', '.join(found) or 'nothing'}")
    if path == key and type(is_typed := _value(found.get(typed))) is not bool:
        raise CorruptError(f"{folder}: expected true or false at {typed!r}, found {is_typed!r}")
    rest = found.keys() - {path}
    entry = found.get(path)
    if not isinstance(entry, ArrayEntry) or rest != (set() if path == array else {typed}):
        return tree
    one = entry.at(at or "")
    if rest and _value(found[typed]) is True and not isinstance(entry, LostEntry):
        if entry.dtype != "uint32" or entry.shape[-1:] != (2,):
            return tree  # Orbax does not record the kind of a key, and only threefry2x32 has keys of this size
        one = ArrayEntry(one.path, "key", one.dtype, one.shape, "threefry2x32")
    return OrbaxTree([one], {one.path: tree.arrays[path]} if path in tree.arrays else {}, [LEAF])


def _merge_trees(trees: Mapping[str, OrbaxTree]) -> OrbaxTree:
    """Joins trees into a dict of trees."""
    return OrbaxTree(
        [entry for tree in trees.values() for entry in tree.entries],
        {path: array for tree in trees.values() for path, array in tree.arrays.items()},
        [Node("dict", "", list(trees)), *(node for tree in trees.values() for node in tree.skeleton)],
        numbers_are_arrays=any(tree.numbers_are_arrays for tree in trees.values()),
    )


def _folders(store: Store, path: str) -> list[str]:
    """Returns the names of the finished folders in a folder."""
    found: list[str] = []
    for name in store.list(path):
        there = store.stat(posixpath.join(path, name))
        if there is not None and there.is_folder and UNFINISHED not in name:
            found.append(name)
    return found


def _value_file(store: Store, path: str) -> str | None:
    for name in VALUES:
        if is_file(store, posixpath.join(path, name)):
            return posixpath.join(path, name)
    return None


def _tree_of_values(value: Any, at: str | None, file: str) -> OrbaxTree:
    """Returns the values of JSON as leaves at a path."""
    tree = OrbaxTree([], {}, [])
    stack: list[tuple[str, bool, int, Any]] = [(at or "", at is None, 0, value)]
    while stack:
        path, root, level, one = stack.pop()
        if level > MAX_LEVELS:
            raise UnsafeError(f"{file}: nested deeper than {MAX_LEVELS} levels")
        try:
            if not isinstance(one, dict | list):
                tree.skeleton.append(LEAF)
                tree.entries.append(ValueEntry(path, *encode(one)))
                continue
            keys = list(one) if isinstance(one, dict) else range(len(one))
            below = [(join(path, key_text(key), root=root), False, level + 1, one[key]) for key in keys]
        except TreeringError as error:
            raise type(error)(f"{file}: {path or '(root)'}: {error}") from None
        tree.skeleton.append(Node("dict", "", list(one)) if isinstance(one, dict) else Node("list", "", len(one)))
        stack += reversed(below)
    return tree


def _value(entry: Entry | None) -> Any:
    return entry.decode() if isinstance(entry, ValueEntry) else None
