"""Reading Orbax: the items of a checkpoint, and the values of those in JSON. For trees of arrays see `orbax_tree`."""

import base64
import datetime
import json
import logging
import os
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple

from .._catalogue import ArrayEntry, Entry, ValueEntry, encode
from .._collector import paused
from .._paths import join, key_text
from .._tree import LEAF, Node
from ..errors import CorruptError, TreeringError, UnsafeError, UnsupportedError
from ..stores.disk import Disk
from . import zarr
from .orbax import CHECKPOINT, TREE, UNFINISHED, read_about, read_json, tree_file
from .orbax_state import read_state
from .orbax_tree import LEVELS, Tree, read_tree
from .zarr_leaves import ZarrReader, folder_size

SHARDINGS = "_sharding"
_DELETED = "_CHECKPOINT_DELETION"
_VERSION_1 = "orbax.checkpoint"  # an empty file
_VALUES = ("metadata", "data.json", "metrics")  # the files of items in JSON
_METRICS = "metrics"
_NAMELESS = {False: ("default",), True: ("state", "pytree")}  # what Orbax calls an only item; in version 1?
_ARRAY = "checkpoint"  # what an array that is an item by itself is called within its folder
_KEY, _TYPED = f"jax_random_key/{_ARRAY}", "jax_random_key_metadata/typed"  # of a PRNG key that is one
_NESTED = 2  # levels of items that consist of items
_log = logging.getLogger("treering")


class OrbaxReader(ZarrReader):
    """See `treering.formats.Reader`."""

    def __init__(self, disk: Disk, path: str, tree: Tree, *, nbytes: int, **about: Any):
        super().__init__("orbax", path, tree.entries, tree.arrays, skeleton=tree.skeleton, nbytes=nbytes, **about)
        self._disk = disk
        self._shardings: dict[str, Mapping[str, Any]] = {}  # by the folder of an item

    def sharding(self, entry: ArrayEntry) -> dict[str, Any] | None:
        array = self._arrays[entry.path]
        if not isinstance(array, zarr.Array):
            return None
        folder = array.folder.path
        if folder not in self._shardings:
            self._shardings[folder] = _read_shardings(self._disk, folder)
        return self._shardings[folder].get(array.name)


class _About(NamedTuple):
    """What is known of a checkpoint as a whole: the items that must be there, and one that is about to go."""

    items: dict[str, str]  # with the classes of their handlers
    version_1: bool
    deleted: Any
    metrics: Mapping[str, float]
    metadata: Any
    created: datetime.datetime | None


def open_checkpoint(disk: Disk, path: str, step: int | None) -> OrbaxReader:
    """The reader of a folder. Raises `CorruptError` and `UnsupportedError`."""
    with paused():
        about = _read_about(disk, path)
        metrics: Mapping[str, float] = {}
        tree = _read_tree(disk, path, None)
        if tree is None:
            tree, metrics = _read_items(disk, path, about)
    metadata = about.metadata or tree.metadata
    metrics = {**about.metrics, **metrics}
    nbytes, created = folder_size(disk, path), about.created
    return OrbaxReader(disk, path, tree, step=step, metrics=metrics, metadata=metadata, nbytes=nbytes, created=created)


def _read_about(disk: Disk, path: str) -> _About:
    names = disk.list(path)
    found = read_about(disk, path) if CHECKPOINT in names else {}
    deletion = read_json(disk, os.path.join(path, _DELETED)) if _DELETED in names else {}
    if not isinstance(found, dict) or not isinstance(deletion, dict):
        raise CorruptError(f"{path}: expected a map in {CHECKPOINT}, and in {_DELETED} if there is one")
    handlers = found.get("item_handlers")
    items = handlers if isinstance(handlers, dict) else {}
    version_1 = _VERSION_1 in names or any(".v1." in str(handler) for handler in items.values())
    metrics = _numbers(found.get("metrics")) or {}
    classes = {name: str(handler).rpartition(".")[2] for name, handler in items.items()}
    metadata, created = found.get("custom_metadata"), _time(found.get("commit_timestamp_nsecs"))
    return _About(classes, version_1, deletion.get("checkpointable_name"), metrics, metadata, created)


def _time(nanoseconds: Any) -> datetime.datetime | None:
    """A moment since 1970, None for what is none."""
    if type(nanoseconds) is not int or nanoseconds <= 0:
        return None
    try:
        return datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(microseconds=nanoseconds // 1000)
    except OverflowError:
        return None


def _read_items(disk: Disk, path: str, about: _About) -> tuple[Tree, Mapping[str, float]]:
    """The tree of all items, and the metrics."""
    metrics: Mapping[str, float] = {}
    names = [name for name in _folders(disk, path) if name != about.deleted]
    for name in about.items:
        if name != about.deleted and name not in names:
            raise CorruptError(f"{path}: expected the item {name!r}, found no folder of it")
    file = _value_file(disk, os.path.join(path, _METRICS))
    numbers = None if file is None or _METRICS not in names else _numbers(read_json(disk, file))
    if numbers is not None:
        metrics = numbers
        names.remove(_METRICS)
    if len(names) == 1 and names[0] in _NAMELESS[about.version_1]:
        tree = _read_item(disk, os.path.join(path, names[0]), None, _NESTED)
        if tree is not None:
            return _as_saved(tree, None, about.items.get(names[0])), metrics
    found = {name: _read_item(disk, os.path.join(path, name), key_text(name), _NESTED) for name in names}
    trees = {
        name: _as_saved(tree, key_text(name), about.items.get(name)) for name, tree in found.items() if tree is not None
    }
    unknown = ", ".join(name for name in found if name not in trees)
    if names and not trees:
        raise UnsupportedError(f"{path}: expected items that are trees of arrays or in JSON, found {unknown}")
    if unknown:
        _log.warning("%s: left out, for they are no trees of arrays and not in JSON: %s", path, unknown)
    return _together(trees), metrics


def _read_item(disk: Disk, path: str, at: str | None, levels: int) -> Tree | None:
    """An item as the tree at a path, None when it is of a kind that is not known here."""
    tree = _read_tree(disk, path, at)
    if tree is not None:
        return tree
    file = _value_file(disk, path)
    if file is not None:
        return _tree_of_values(read_json(disk, file), at, file)
    found: dict[str, Tree] = {}
    for name in _folders(disk, path) if levels else ():
        below = join(at or "", key_text(name), root=at is None)
        tree = _read_item(disk, os.path.join(path, name), below, levels - 1)
        if tree is None:
            return None
        found[name] = tree
    return _together(found) if found else None


def _read_tree(disk: Disk, path: str, at: str | None) -> Tree | None:
    file = tree_file(disk, path)
    return None if file is None else read_tree(disk, path, at) if file == TREE else read_state(disk, path, at)


def _as_saved(tree: Tree, at: str | None, handler: str | None) -> Tree:
    """An item, without the names that are its handler's where it was one array or one PRNG key."""
    array, key, typed = (join(at or "", name, root=at is None) for name in (_ARRAY, _KEY, _TYPED))
    found = {entry.path: entry for entry in tree.entries}
    path = {"ArrayCheckpointHandler": array, "JaxRandomKeyCheckpointHandler": key}.get(handler or "", "")
    rest = found.keys() - {path}
    entry = found.get(path)
    if not isinstance(entry, ArrayEntry) or rest != (set() if path == array else {typed}):
        return tree
    one = entry.at(at or "")
    if rest and _value(found[typed]) is True:
        if entry.dtype != "uint32" or entry.shape[-1:] != (2,):
            return tree  # Orbax does not say of which kind the key is, and only one kind is of this size
        one = ArrayEntry(one.path, "key", one.dtype, one.shape, "threefry2x32")
    return Tree([one], {one.path: tree.arrays[path]}, [LEAF])


def _together(trees: Mapping[str, Tree]) -> Tree:
    """A dict of trees."""
    return Tree(
        [entry for tree in trees.values() for entry in tree.entries],
        {path: array for tree in trees.values() for path, array in tree.arrays.items()},
        [Node("dict", "", list(trees)), *(node for tree in trees.values() for node in tree.skeleton)],
    )


def _folders(disk: Disk, path: str) -> list[str]:
    """The names of the finished folders in a folder."""
    found: list[str] = []
    for name in disk.list(path):
        there = disk.stat(os.path.join(path, name))
        if there is not None and stat.S_ISDIR(there.st_mode) and UNFINISHED not in name:
            found.append(name)
    return found


def _value_file(disk: Disk, path: str) -> str | None:
    for name in _VALUES:
        there = disk.stat(os.path.join(path, name))
        if there is not None and stat.S_ISREG(there.st_mode):
            return os.path.join(path, name)
    return None


def _tree_of_values(value: Any, at: str | None, file: str) -> Tree:
    """What JSON says, as leaves at a path."""
    tree = Tree([], {}, [])
    stack: list[tuple[str, bool, int, Any]] = [(at or "", at is None, 0, value)]
    while stack:
        path, root, level, one = stack.pop()
        if level > LEVELS:
            raise UnsafeError(f"{file}: nested deeper than {LEVELS} levels")
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


def _value(entry: Entry) -> Any:
    return entry.decode() if isinstance(entry, ValueEntry) else None


def _numbers(value: Any) -> dict[str, float] | None:
    """A map of numbers, None for anything else."""
    if not isinstance(value, dict) or not all(type(number) in (int, float) for number in value.values()):
        return None
    try:
        return {name: float(number) for name, number in value.items()}
    except OverflowError:
        return None


def _read_shardings(disk: Disk, folder: str) -> dict[str, Any]:
    """How arrays were spread, by their names in a folder; what is not understood is left out."""
    found: dict[str, Any] = {}
    try:
        listed = read_json(disk, os.path.join(folder, SHARDINGS))
        for name, text in listed.items():
            about = json.loads(text)
            if about["sharding_type"] == "NamedSharding":
                mesh = dict(zip(about["axis_names"], about["shape"], strict=True))
                found[base64.urlsafe_b64decode(name).decode()] = {"mesh": mesh, "spec": about["partition_spec"]}
    except (OSError, CorruptError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        pass  # for information only
    return found
