"""A tree as Orbax stores it: a list of key paths in JSON, and a zarr array for each leaf that is no text."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from .. import _dtypes
from .._catalogue import ArrayEntry, Entry, ValueEntry, encode
from .._paths import few, join, key_text
from .._tree import LEAF, Node
from ..errors import CorruptError, TreeringError, UnsafeError, UnsupportedError
from ..stores.disk import Disk
from . import zarr
from .foreign import Stored
from .orbax import TREE, read_json
from .statedict import check_inside

SEQUENCE, DICT = 1, 2  # kinds of keys: the latter of attributes as well
STRINGS = "_strings.json"
ABOUT_ARRAYS = "array_metadatas"  # a folder of files, one from each process
KEY = "random_key_impl"
LEVELS = 1000
_EMPTY = {"Dict": Node("dict", "", []), "List": Node("list", "", 0), "Tuple": Node("tuple", "", 0)}
_EMPTY["NamedTuple"] = _EMPTY["Tuple"]  # of which class, is not recorded
_BARE = (*_EMPTY, "None")  # kinds of places where nothing is stored
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")


class Tree(NamedTuple):
    """Leaves in order, the arrays among them, and the containers around them."""

    entries: list[Entry]
    arrays: Mapping[str, Stored]
    skeleton: list[Node | int]
    metadata: Any = None


class _Key(msgspec.Struct):
    key: str
    key_type: int


class _Kind(msgspec.Struct):
    value_type: str
    skip_deserialize: bool = False


class _Leaf(msgspec.Struct):
    key_metadata: list[_Key]
    value_metadata: _Kind


class _About(msgspec.Struct):
    tree_metadata: dict[str, _Leaf]
    use_ocdbt: bool | None = None
    use_zarr3: bool | None = None
    custom_metadata: Any = None


class _Array(msgspec.Struct):
    param_name: str
    ext_metadata: dict[str, Any] | None = None


class _ArrayAbout(msgspec.Struct):
    array_metadata: _Array


class _ArraysAbout(msgspec.Struct):
    array_metadatas: list[_ArrayAbout]


class _Place(NamedTuple):
    """A leaf's path here, its name there, and of what kind it is said to be."""

    path: str
    name: str
    kind: str


class _Branch:
    """A container that is being put together."""

    def __init__(self, kind: int):
        self.kind = kind
        self.children: dict[str, _Branch | _Place] = {}


def read_tree(disk: Disk, folder: str, at: str | None) -> Tree:
    """The tree in a folder, as it lies at a path or (None) as the root.

    Numbers that were no arrays are read, arrays are not. Raises `CorruptError` and `UnsupportedError`.
    """
    file = os.path.join(folder, TREE)
    try:
        about = msgspec.convert(read_json(disk, file), _About)
    except (msgspec.ValidationError, RecursionError) as error:
        raise CorruptError(f"{file}: {error}") from None
    try:
        places, skeleton = _places(_branches(about.tree_metadata.values()), at)
        _check(places)
    except TreeringError as error:
        raise type(error)(f"{file}: {error}") from None
    listed = [place for place in places if place.kind in _ARRAYS]
    arrays = dict(zip((place.path for place in listed), _open(disk, folder, listed, about), strict=True))
    numbers = _read_numbers(arrays, listed)
    texts = _read_texts(disk, folder) if any(place.kind == "string" for place in places) else {}
    keys = _read_keys(disk, folder, [place.name for place in listed if arrays[place.path].dtype == "uint32"])
    entries: list[Entry] = []
    for path, name, kind in places:
        if path in numbers or kind not in _ARRAYS:
            value = numbers[path] if path in numbers else None if kind == "None" else texts.get(name)
            if kind == "string" and not isinstance(value, str):
                raise CorruptError(f"{os.path.join(folder, STRINGS)}: expected the text {name!r}, found none")
            entries.append(ValueEntry(path, *encode(value)))
            arrays.pop(path, None)
            continue
        dtype, shape, impl = arrays[path].dtype, arrays[path].shape, keys.get(name, "")
        if impl and not shape:
            raise CorruptError(f"{folder}: {path}: expected the data of a key, found a number")
        entries.append(ArrayEntry(path, "key" if impl else "numpy", dtype, shape, impl))
    return Tree(entries, arrays, skeleton, about.custom_metadata)


def _branches(leaves: Iterable[_Leaf]) -> _Branch | _Place:
    """The containers that key paths describe. Raises `CorruptError` when they contradict each other."""
    root: _Branch | _Place | None = None
    for leaf in leaves:
        keys, kind = leaf.key_metadata, leaf.value_metadata.value_type
        name = ".".join(key.key for key in keys)
        if len(keys) > LEVELS:
            raise UnsafeError(f"a leaf more than {LEVELS} levels deep")
        if leaf.value_metadata.skip_deserialize and kind not in _EMPTY and kind != "None":
            raise UnsupportedError(f"{name}: a leaf of type {kind} that was not stored with the others")
        parent, last = None, ""
        for key in keys:
            place = root if parent is None else parent.children.get(last)
            if place is None or (isinstance(place, _Place) and place.kind in _BARE):  # which was filled later
                place = _Branch(key.key_type)
                if parent is None:
                    root = place
                else:
                    parent.children[last] = place
            if isinstance(place, _Place) or place.kind != key.key_type or key.key_type not in (SEQUENCE, DICT):
                raise CorruptError(f"{name}: expected one kind of container with one kind of keys at each place")
            parent, last = place, key.key
        there = root if parent is None else parent.children.get(last)
        if there is not None and not (isinstance(there, _Branch) and kind in _BARE):
            raise CorruptError(f"{name}: expected one leaf of this name, found two")
        if there is None and parent is not None:
            parent.children[last] = _Place("", name, kind)
        elif there is None:
            root = _Place("", name, kind)
    return root or _Branch(DICT)


def _places(tree: _Branch | _Place, at: str | None) -> tuple[list[_Place], list[Node | int]]:
    """The leaves in order, with their paths, and the skeleton."""
    found: list[_Place] = []
    skeleton: list[Node | int] = []
    stack: list[tuple[str, bool, _Branch | _Place]] = [(at or "", at is None, tree)]
    while stack:
        path, root, place = stack.pop()
        if isinstance(place, _Place):
            skeleton.append(_EMPTY.get(place.kind, LEAF))
            if place.kind not in _EMPTY:
                found.append(place._replace(path=path))
            continue
        keys = list(place.children)
        if place.kind == SEQUENCE:
            keys = [str(n) for n in range(len(keys))]
            if any(key not in place.children for key in keys):
                raise CorruptError(
                    f"{path or '(root)'}: expected items numbered from 0, found {list(place.children)!r:.100}"
                )
        skeleton.append(Node("list", "", len(keys)) if place.kind == SEQUENCE else Node("dict", "", keys))
        stack += [(join(path, key_text(key), root=root), False, place.children[key]) for key in reversed(keys)]
    return found, skeleton


def _check(places: Sequence[_Place]) -> None:
    """Raises `UnsupportedError` for leaves of other kinds, and `CorruptError` where one is lost."""
    if unknown := [place for place in places if place.kind not in (*_ARRAYS, "None", "string")]:
        listed = few(tuple(f"{place.path} ({place.kind})" for place in unknown))
        raise UnsupportedError(f"leaves of types that only their own handlers can read: {listed}")
    names: dict[str, str] = {}
    for path, name, kind in places:
        if kind != "None" and names.setdefault(name, path) != path:
            raise CorruptError(f"{path} and {names[name]} were stored under one name, {name!r}; one of them is lost")


def _open(disk: Disk, folder: str, places: Sequence[_Place], about: _About) -> list[zarr.Array]:
    if not places:
        return []
    manifest = os.path.join(folder, zarr.DATABASE)
    there = disk.stat(manifest) is not None
    ocdbt = there if about.use_ocdbt is None else about.use_ocdbt
    if ocdbt and not there:
        raise CorruptError(f"{manifest}: expected a database, found nothing; was the checkpoint copied as a whole?")
    for place in places:
        if not ocdbt and place.name:
            check_inside(folder, place.name)
    return zarr.Folder(folder, ocdbt=ocdbt).arrays(
        [place.name for place in places], "zarr3" if about.use_zarr3 else "zarr"
    )


def _read_numbers(arrays: Mapping[str, zarr.Array], places: Sequence[_Place]) -> dict[str, Any]:
    """The values of leaves that were Python's numbers, by path."""
    paths = [place.path for place in places if place.kind == "scalar" and arrays[place.path].shape == ()]
    found: dict[str, Any] = {}
    for path, value in zip(paths, zarr.read([(arrays[path], ()) for path in paths]), strict=True):
        kind = bool if value.dtype == bool else int if _dtypes.is_integer(value.dtype) else float
        found[path] = (complex if value.dtype.kind == "c" else kind)(value)
    return found


def _read_texts(disk: Disk, folder: str) -> Mapping[str, Any]:
    file = os.path.join(folder, STRINGS)
    found = read_json(disk, file) if disk.stat(file) is not None else {}
    if not isinstance(found, dict):
        raise CorruptError(f"{file}: expected a map of texts")
    return found


def _read_keys(disk: Disk, folder: str, names: Sequence[str]) -> dict[str, str]:
    """The implementations of those of the arrays of these names that are typed keys."""
    left, found = set(names), dict[str, str]()
    place = os.path.join(folder, ABOUT_ARRAYS)
    for file in disk.list(place):
        if not left:
            break
        try:
            about = msgspec.convert(read_json(disk, os.path.join(place, file)), _ArraysAbout)
        except (msgspec.ValidationError, RecursionError) as error:
            raise CorruptError(f"{os.path.join(place, file)}: {error}") from None
        for one in about.array_metadatas:
            impl = (one.array_metadata.ext_metadata or {}).get(KEY)
            if impl and one.array_metadata.param_name in left:
                found[one.array_metadata.param_name] = str(impl)
            left.discard(one.array_metadata.param_name)
    return found
