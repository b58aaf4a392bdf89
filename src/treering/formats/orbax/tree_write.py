"""Writes one tree as Orbax stores it: a list of leaves in JSON, and arrays in an OCDBT database of zarr 2."""

import base64
import json
import math
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..._core.entries import NO_ARRAY, ArrayEntry, Entry, IteratorEntry, ValueEntry
from ..._core.leaf_paths import key_text, split
from ..._core.skeleton import Node, Skeleton
from ..._core.source import Source
from ...stores.sequential import file_of_new_folder
from ...stores.store import Store
from .._zarr import metadata
from .._zarr.chunks import Chunks
from .._zarr.leaves import add_array, add_number
from .._zarr.writer import ZarrWriter
from .iterators import no_item
from .metadata import DICT, SEQUENCE, STRINGS
from .schema import ARRAY_META, ONE_DEVICE, SHARDINGS, TREE
from .tree import KEY, MAX_LEVELS

_EMPTY = {"dict": "Dict", "list": "List", "tuple": "Tuple"}  # Orbax records "None" for empty containers of other kinds


class WrittenLeaf(NamedTuple):
    """A leaf or an empty container as Orbax lists it: the keys to it with their kinds, and its own kind."""

    keys: tuple[tuple[str, int], ...]
    kind: str
    entry: Entry | None

    @property
    def name(self) -> str:
        return ".".join(key for key, _ in self.keys)


def add_arrays(
    writer: ZarrWriter, leaves: Iterable[WrittenLeaf], contents: Source, chunks: Mapping[str, Chunks]
) -> None:
    """Begins to write this process's chunks of a tree's arrays and numbers."""
    for leaf in leaves:
        if isinstance(leaf.entry, ArrayEntry):
            add_array(writer, leaf.name, leaf.entry, contents, chunks[leaf.entry.path])
        elif leaf.kind == "scalar":
            add_number(writer, leaf.name, _value(leaf))


def write_rest(
    store: Store, folder: str, leaves: Sequence[WrittenLeaf], contents: Source, chunks: Mapping[str, Chunks]
) -> None:
    """Writes everything of a tree except its arrays and numbers."""
    put(store, posixpath.join(folder, TREE), _tree(leaves))
    texts = {leaf.name: _value(leaf) for leaf in leaves if leaf.kind == "string"}
    if texts:
        put(store, posixpath.join(folder, STRINGS), texts)
    on_device = [leaf for leaf in leaves if leaf.kind == "jax.Array"]
    if on_device:
        places = {
            _encoded(leaf.name): json.dumps(_sharding(contents.sharding(leaf.entry)))
            for leaf in on_device
            if isinstance(leaf.entry, ArrayEntry)
        }
        put(store, posixpath.join(folder, SHARDINGS), places)
        store.make_folder(posixpath.join(folder, ARRAY_META))
        about = {"array_metadatas": [_array(leaf, chunks) for leaf in on_device]}
        put(store, posixpath.join(folder, ARRAY_META, "process_0"), about)


def _encoded(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _sharding(place: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns a recorded place as Orbax records it."""
    if place is None or "mesh" not in place or "local" in place or "platform" in place:
        return ONE_DEVICE
    mesh, devices = place["mesh"], place.get("devices")
    size, kinds = math.prod(mesh.values()), place.get("axis_types") or ["auto"] * len(mesh)
    return {
        "sharding_type": "NamedSharding",
        "shape": [*mesh.values()],
        "axis_names": [*mesh],
        "axis_types": [f"AxisType.{kind.capitalize()}" for kind in kinds],
        "partition_spec": place["spec"],
        # Orbax arranges them by the shape. Without this list, it would take all devices of the job that restores.
        "device_mesh": {"mesh": [{"id": number} for number in devices or range(size)]},
    }


def leaves_of(skeleton: Skeleton, entries: Iterable[Entry]) -> Iterator[WrittenLeaf]:
    """Yields the leaves and empty containers that Orbax lists of a tree, in order."""
    rest = iter(entries)
    stack: list[tuple[tuple[str, int], ...]] = [()]
    for node in skeleton:
        keys = stack.pop()
        if not isinstance(node, Node):
            entry = next(rest)
            yield WrittenLeaf(keys, _kind(entry), entry)
        elif node.count():
            kind = SEQUENCE if node.kind in ("list", "tuple", "positional") else DICT
            stack += [(*keys, (split(key_text(key))[0], kind)) for key in reversed(node.children())]
        else:
            yield WrittenLeaf(keys, _EMPTY.get(node.kind, "None"), None)


def _kind(entry: Entry) -> str:
    if isinstance(entry, ArrayEntry):
        return "np.ndarray" if entry.type.startswith("numpy") else "jax.Array"
    return "None" if entry.type in NO_ARRAY else "string" if entry.type == "str" else "scalar"


def problems_of(leaves: Iterable[WrittenLeaf], at: str = "") -> Iterator[str]:
    """Yields a line for each leaf that Orbax cannot hold. Each begins with `at`, the path of the tree."""
    names: dict[str, str] = {}
    for leaf in leaves:
        path = "/".join([*([at] if at else []), *(key for key, _ in leaf.keys)])
        if reason := _refused(leaf, path):
            yield f"  {path or '(root)'}: {reason}"
        if leaf.kind not in _EMPTY.values() and leaf.kind != "None" and names.setdefault(leaf.name, path) != path:
            yield f"  {path}: Orbax would store it under the same name as {names[leaf.name]}; rename one of them"


def _refused(leaf: WrittenLeaf, path: str) -> str | None:
    if len(leaf.keys) > MAX_LEVELS:
        return f"it is more than {MAX_LEVELS} levels deep"
    if isinstance(leaf.entry, ArrayEntry):
        dtype = leaf.entry.dtype
        return None if metadata.can_hold(dtype) else f"dtype {dtype}, which zarr cannot hold"
    if isinstance(leaf.entry, IteratorEntry):
        return no_item(path)
    if leaf.kind != "scalar":
        return None
    value = _value(leaf)
    if type(value) is int:
        return None if -(1 << 63) <= value < 1 << 64 else "an int of more than 64 bits"
    return None if type(value) in (bool, float) else f"a {type(value).__name__}, which Orbax cannot hold"


def _value(leaf: WrittenLeaf) -> Any:
    assert isinstance(leaf.entry, ValueEntry)
    return leaf.entry.decode()


def _tree(leaves: Sequence[WrittenLeaf]) -> Any:
    listed: dict[str, Any] = {}
    for leaf in leaves:
        keys = [{"key": key, "key_type": kind} for key, kind in leaf.keys]
        empty = leaf.entry is None or leaf.kind == "None"
        value: dict[str, Any] = {"value_type": leaf.kind, "skip_deserialize": empty}
        if leaf.kind == "jax.Array":
            assert isinstance(leaf.entry, ArrayEntry)
            value["write_shape"] = leaf.entry.shape
        listed[str(tuple(key for key, _ in leaf.keys))] = {"key_metadata": keys, "value_metadata": value}
    return {
        "tree_metadata": listed,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _array(leaf: WrittenLeaf, chunks: Mapping[str, Chunks]) -> Any:
    assert isinstance(leaf.entry, ArrayEntry)
    shape = chunks[leaf.entry.path].shape
    key = {KEY: leaf.entry.impl} if leaf.entry.type == "key" else None
    about = {"param_name": leaf.name, "write_shape": leaf.entry.shape, "chunk_shape": shape, "ext_metadata": key}
    return {"array_metadata": about}


def put(store: Store, path: str, value: Any) -> None:
    """Writes a file of a new folder: text as it is, any other value as JSON."""
    with file_of_new_folder(store, path) as file:
        file.write((value if isinstance(value, str) else json.dumps(value)).encode())
