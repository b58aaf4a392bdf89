"""Reads a tree as Orbax stores it: a list of key paths in JSON, and a zarr array for each leaf that is not text.

Releases up to 2024 could also aggregate leaves, as Flax did: put them into one file in MessagePack.
"""

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..._core import dtypes
from ..._core.entries import ArrayEntry, Entry, ValueEntry, lost_entry
from ..._core.leaf_paths import join, join_names, key_text
from ..._core.skeleton import LEAF, Node
from ..._core.values import encode
from ..._threads.preload_decoders import preload_decoders
from ...errors import CorruptError, TreeringError, UnsafeError, UnsupportedError
from ...stores.file_io import is_file, open_fetched
from ...stores.store import Store
from .._shared.reader import Stored
from .._shared.safety import check_inside
from .._shared.state_dict import StateDict, StateLeaves
from .._zarr import array as zarr
from .._zarr.folder import DATABASE, Folder
from .metadata import DICT, SEQUENCE, STRINGS, LeafMetadata, TreeFile, guess_metadata, read_metadata, read_texts
from .schema import ARRAY_META, PLACEHOLDERS, STATE, TREE, read_json

KEY = "random_key_impl"
MAX_LEVELS = 1000
_EMPTY = {"Dict": Node("dict", "", []), "List": Node("list", "", 0), "Tuple": Node("tuple", "", 0)}
_EMPTY["NamedTuple"] = _EMPTY["Tuple"]  # its class is not recorded
_EMPTY_KINDS = (*_EMPTY, "None")  # kinds of nodes without data
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")


def read_aggregated(store: Store, folder: str, at: str | None) -> StateLeaves:
    """Reads the leaves of the state dict in a folder, placed at a path or (None) as the root. Raises `CorruptError`.

    Text that stands for an array stays text, see `placeholder`.
    """
    file = open_fetched(store, posixpath.join(folder, STATE))
    scanned = StateDict(file)
    return scanned.leaves(scanned.value_of_range(0, file.size), at)


def read_state(store: Store, folder: str, at: str | None) -> StateLeaves:
    """Reads the leaves of the state dict in a folder, and opens the arrays it refers to. Raises `CorruptError`."""
    leaves = read_aggregated(store, folder, at)
    names = {entry.path: name for entry in leaves.entries if (name := placeholder(entry)) is not None}
    ocdbt = store.stat(posixpath.join(folder, DATABASE)) is not None
    for name in () if ocdbt else names.values():
        check_inside(folder, name)
    arrays = zarr.find(Folder(store, folder, ocdbt=ocdbt), list(names.values()), "zarr") if names else []
    entries: dict[str, Entry] = {entry.path: entry for entry in leaves.entries}
    stored: dict[str, Stored] = {**leaves.arrays}
    for path, array in zip(names, arrays, strict=True):
        if isinstance(array, CorruptError):
            entries[path] = lost_entry(path, str(array))
        else:
            entries[path], stored[path] = ArrayEntry(path, "numpy", array.dtype, array.shape), array
    return StateLeaves(list(entries.values()), stored, leaves.skeleton)


def placeholder(entry: Entry) -> str | None:
    """Returns the name of the array that a leaf of text stands for; None for all other leaves."""
    if not isinstance(entry, ValueEntry) or entry.type != "str":
        return None
    text = entry.decode()
    prefix = next((prefix for prefix in PLACEHOLDERS if text.startswith(prefix)), None)
    return None if prefix is None else text.removeprefix(prefix)


class OrbaxTree(NamedTuple):
    """Holds leaves in order, the arrays among them, and the containers around them."""

    entries: list[Entry]
    arrays: Mapping[str, Stored]
    skeleton: list[Node | int]
    metadata: Any = None
    numbers_are_arrays: bool = False  # see `treering.formats.Source`

    @classmethod
    def lost(cls, path: str, why: str) -> "OrbaxTree":
        """Returns a tree of which nothing can be read."""
        return cls([lost_entry(path, why, tree=True)], {}, [LEAF])


class _ArrayName(msgspec.Struct):
    param_name: str
    ext_metadata: dict[str, Any] | None = None


class _ArrayMetadata(msgspec.Struct):
    array_metadata: _ArrayName


class _ArrayMetadataFile(msgspec.Struct):
    array_metadatas: list[_ArrayMetadata]


preload_decoders(_ArrayMetadataFile)


class _LeafPlace(NamedTuple):
    """Holds a leaf's path in Treering, its name in Orbax, and its recorded kind."""

    path: str
    name: str
    kind: str
    aggregated: bool
    described: bool  # True if `ARRAY_META` should describe it, too


class _Branch:
    """A container under construction, with the kinds of its keys.

    A list within a module that was saved itself (``nnx.List``) has keys of both kinds: attributes, and the numbers of
    the items that have something to save.
    """

    def __init__(self) -> None:
        self.children: dict[str, _Branch | _LeafPlace] = {}
        self.kinds: dict[str, int] = {}

    def is_list(self) -> bool:
        return bool(self.kinds) and DICT not in self.kinds.values()

    def keys(self, path: str) -> list[str]:
        """Returns the keys in order, numbers first. Raises `CorruptError` if an item of a list is missing."""
        numbers = sorted((key for key, kind in self.kinds.items() if kind == SEQUENCE), key=lambda key: (len(key), key))
        if self.is_list() and numbers != [str(n) for n in range(len(numbers))]:
            raise CorruptError(f"{path or '(root)'}: expected items numbered from 0, found {[*self.kinds]!r:.100}")
        return numbers + [key for key, kind in self.kinds.items() if kind == DICT]


def read_tree(store: Store, folder: str, at: str | None) -> OrbaxTree:
    """Reads the tree in a folder, placed at a path or (None) as the root.

    Reads the values of Python numbers; arrays are only opened. Raises `CorruptError` and `UnsupportedError`.
    """
    return _tree(store, folder, at, read_metadata(store, folder))


def read_remnant(store: Store, folder: str, at: str | None) -> OrbaxTree:
    """Reads the rest of a tree whose list of leaves is gone: its arrays, at the paths that their names suggest.

    The list said which names have keys with dots in them, which containers were lists, and which leaves were not
    arrays. So a leaf that cannot be read stands for it.
    """
    why = f"{posixpath.join(folder, TREE)}: expected the list of the tree's leaves, found nothing"
    tree = _tree(store, folder, at, guess_metadata(store, folder))
    top = tree.skeleton[0]
    if not isinstance(top, Node):
        return OrbaxTree.lost(at or "", why)
    missing = lost_entry(join(at or "", TREE, root=at is None), why)
    top = Node("dict", "", [*top.children(), TREE])
    skeleton = [top, *tree.skeleton[1:], LEAF]
    return OrbaxTree(
        [*tree.entries, missing],
        tree.arrays,
        skeleton,
        tree.metadata,
        numbers_are_arrays=True,
    )


def _tree(store: Store, folder: str, at: str | None, about: TreeFile) -> OrbaxTree:
    inline = (
        read_aggregated(store, folder, at) if is_file(store, posixpath.join(folder, STATE)) else StateLeaves([], {}, ())
    )
    aggregated = {entry.path: entry for entry in inline.entries if placeholder(entry) is None}
    try:
        places, skeleton = _places(_branches(about.tree_metadata.values()), at)
        _check([place for place in places if place.path not in aggregated and not place.aggregated])
    except TreeringError as error:
        raise type(error)(f"{posixpath.join(folder, TREE)}: {error}") from None
    listed = [p for p in places if p.kind in _ARRAYS and p.path not in aggregated and not p.aggregated]
    found = dict(zip((place.path for place in listed), _open(store, folder, listed, about), strict=True))
    arrays: dict[str, zarr.Array] = {path: one for path, one in found.items() if isinstance(one, zarr.Array)}
    reasons = {path: str(one) for path, one in found.items() if isinstance(one, CorruptError)}
    values: dict[str, Any] = _read_numbers(arrays, listed, reasons)
    texts = read_texts(store, folder) if any(p.kind == "string" and not p.aggregated for p in places) else {}
    uints = [place.name for place in listed if place.path in arrays and arrays[place.path].dtype == "uint32"]
    keys, rest = _read_keys(store, folder, uints)
    # A shape in `_METADATA` proves that `ARRAY_META` once described the array. Without that, uint32 may be a key.
    for place in listed:
        if place.described and place.name in rest and arrays[place.path].shape:
            reasons[place.path] = (
                f"{posixpath.join(folder, ARRAY_META)}: expected a record whether {place.name!r} is a PRNG key or "
                "plain numbers, found nothing; was the checkpoint copied completely?"
            )
    entries: list[Entry] = []
    stored: dict[str, Stored] = {}
    for path, name, kind, skipped, _ in places:
        if path in aggregated and kind != "None":
            entries.append(aggregated[path])
            if path in inline.arrays:
                stored[path] = inline.arrays[path]
            continue
        if skipped:
            reasons[path] = f"{posixpath.join(folder, STATE)}: expected the leaf {name!r}, found none"
        elif kind == "string" and not isinstance(texts.get(name), str):
            reasons[path] = f"{posixpath.join(folder, STRINGS)}: expected the text {name!r}, found none"
        if path in reasons:
            entries.append(lost_entry(path, reasons[path]))
        elif path in values or kind in ("None", "string"):
            value = values[path] if path in values else texts[name] if kind == "string" else None
            entries.append(ValueEntry(path, *encode(value)))
        else:
            dtype, shape, impl = arrays[path].dtype, arrays[path].shape, keys.get(name, "")
            if impl and not shape:
                raise CorruptError(f"{folder}: {path}: expected the data of a key, found a number")
            entries.append(
                ArrayEntry(path, "key" if impl else "jax" if kind == "jax.Array" else "numpy", dtype, shape, impl)
            )
            stored[path] = arrays[path]
    return OrbaxTree(entries, stored, skeleton, about.custom_metadata)


def _branches(leaves: Iterable[LeafMetadata]) -> _Branch | _LeafPlace:
    """Builds the containers that key paths describe. Raises `CorruptError` if the paths contradict each other."""
    root: _Branch | _LeafPlace | None = None
    for leaf in leaves:
        keys, kind = leaf.key_metadata, leaf.value_metadata.value_type
        name = ".".join(key.key for key in keys)
        if len(keys) > MAX_LEVELS:
            raise UnsafeError(f"a leaf more than {MAX_LEVELS} levels deep")
        aggregated = leaf.value_metadata.skip_deserialize and kind not in _EMPTY_KINDS
        described = leaf.value_metadata.write_shape is not None
        parent, last = None, ""
        for key in keys:
            place = root if parent is None else parent.children.get(last)
            if place is None or (isinstance(place, _LeafPlace) and place.kind in _EMPTY_KINDS):  # filled later
                place = _Branch()
                if parent is None:
                    root = place
                else:
                    parent.children[last] = place
            if isinstance(place, _LeafPlace):
                raise CorruptError(f"{name}: expected a leaf or a container at each place, found both")
            if key.key_type not in (SEQUENCE, DICT):
                raise CorruptError(f"{name}: expected keys of kind {SEQUENCE} or {DICT}, found kind {key.key_type}")
            if place.kinds.setdefault(key.key, key.key_type) != key.key_type:
                raise CorruptError(f"{name}: expected one key {key.key!r} at this place, found a number and a name")
            parent, last = place, key.key
        there = root if parent is None else parent.children.get(last)
        if there is not None and not (isinstance(there, _Branch) and kind in _EMPTY_KINDS):
            raise CorruptError(f"{name}: expected one leaf of this name, found two")
        if there is None and parent is not None:
            parent.children[last] = _LeafPlace("", name, kind, aggregated, described)
        elif there is None:
            root = _LeafPlace("", name, kind, aggregated, described)
    return root or _Branch()


def _places(tree: _Branch | _LeafPlace, at: str | None) -> tuple[list[_LeafPlace], list[Node | int]]:
    """Returns the leaves in order, with their paths, and the skeleton."""
    found: list[_LeafPlace] = []
    skeleton: list[Node | int] = []
    stack: list[tuple[str, bool, _Branch | _LeafPlace]] = [(at or "", at is None, tree)]
    while stack:
        path, root, place = stack.pop()
        if isinstance(place, _LeafPlace):
            skeleton.append(_EMPTY.get(place.kind, LEAF))
            if place.kind not in _EMPTY:
                found.append(place._replace(path=path))
            continue
        keys = place.keys(path)
        skeleton.append(Node("list", "", len(keys)) if place.is_list() else Node("dict", "", keys))
        stack += [(join(path, key_text(key), root=root), False, place.children[key]) for key in reversed(keys)]
    return found, skeleton


def _check(places: Sequence[_LeafPlace]) -> None:
    """Raises `UnsupportedError` for leaves of unknown kinds, and `CorruptError` if two leaves have one name."""
    if unknown := [place for place in places if place.kind not in (*_ARRAYS, "None", "string")]:
        listed = join_names(tuple(f"{place.path} ({place.kind})" for place in unknown))
        raise UnsupportedError(f"leaves of types that only their own handlers can read: {listed}")
    names: dict[str, str] = {}
    for path, name, kind, *_ in places:
        if kind != "None" and names.setdefault(name, path) != path:
            raise CorruptError(f"{path} and {names[name]} were stored under one name, {name!r}; one of them is lost")


def _open(store: Store, folder: str, places: Sequence[_LeafPlace], about: TreeFile) -> list[zarr.Array | CorruptError]:
    if not places:
        return []
    manifest = posixpath.join(folder, DATABASE)
    there = store.stat(manifest) is not None
    ocdbt = there if about.use_ocdbt is None else about.use_ocdbt
    if ocdbt and not there:
        raise CorruptError(f"{manifest}: expected a database, found nothing; was the checkpoint copied completely?")
    for place in places:
        if not ocdbt and place.name:
            check_inside(folder, place.name)
    # The releases before 0.10 left that to TensorStore.
    missing: zarr.Missing = "damage" if about.store_array_data_equal_to_fill_value else "metadata"
    names, driver = [place.name for place in places], "zarr3" if about.use_zarr3 else "zarr"
    return zarr.find(Folder(store, folder, ocdbt=ocdbt), names, driver, missing=missing)


def _read_numbers(
    arrays: Mapping[str, zarr.Array], places: Sequence[_LeafPlace], reasons: dict[str, str]
) -> dict[str, Any]:
    """Reads leaves that were Python numbers, by path; adds to `reasons` why others cannot be read."""
    scalars = {place.path for place in places if place.kind == "scalar"}
    paths = [path for path, array in arrays.items() if path in scalars and array.shape == ()]
    try:
        values = zarr.read([(arrays[path], ()) for path in paths])
    except UnsafeError:
        raise
    except CorruptError as error:
        if len(paths) == 1:
            reasons[paths[0]] = str(error)
            return {}
        # One damaged number fails the joint read, so reading one by one finds it.
        alone = [_read_numbers({path: arrays[path]}, places, reasons) for path in paths]
        return {path: value for one in alone for path, value in one.items()}
    found: dict[str, Any] = {}
    for path, value in zip(paths, values, strict=True):
        kind = bool if value.dtype == bool else int if dtypes.is_integer(value.dtype) else float
        found[path] = (complex if value.dtype.kind == "c" else kind)(value)
    return found


def _read_keys(store: Store, folder: str, names: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Returns the implementations of the named arrays that are typed keys, and the names that no file describes."""
    left, found = set(names), dict[str, str]()
    place = posixpath.join(folder, ARRAY_META)
    for file in store.list(place):
        if not left:
            break
        try:
            about = msgspec.convert(read_json(store, posixpath.join(place, file)), _ArrayMetadataFile)
        except (msgspec.ValidationError, RecursionError) as error:
            raise CorruptError(f"{posixpath.join(place, file)}: {error}") from None
        for one in about.array_metadatas:
            impl = (one.array_metadata.ext_metadata or {}).get(KEY)
            if impl and one.array_metadata.param_name in left:
                found[one.array_metadata.param_name] = str(impl)
            left.discard(one.array_metadata.param_name)
    return found, left
