"""Writing Orbax: one tree right in a folder, its arrays in an OCDBT database of zarr 2."""

import base64
import json
import posixpath
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..._core.entries import NO_ARRAY, ArrayEntry, Entry, ValueEntry
from ..._core.leaf_paths import key_text, split
from ..._core.skeleton import Node
from ..._core.source import Source
from ..._processes.calls import Call
from ..._processes.layouts import Layout
from ...errors import MismatchError, UnsupportedError
from ...stores.sequential import file_of_new_folder
from ...stores.store import Store
from .._zarr import metadata
from .._zarr.chunks import Chunks
from .._zarr.folder import part_of_database
from .._zarr.joint_write import write_folder
from .._zarr.leaves import add_array, add_number, chunks_of
from .._zarr.writer import Writer
from .metadata import DICT, SEQUENCE, STRINGS
from .parts import NAMES, parts
from .schema import ABOUT_ARRAYS, CHECKPOINT, COMMITTED, SHARDINGS, TREE, UNFINISHED
from .tree import KEY, LEVELS

_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
_EMPTY = {"dict": "Dict", "list": "List", "tuple": "Tuple"}  # of other kinds Orbax says "None"
# The sharding with which Orbax restores JAX arrays by default: on the first device, whatever it is.
_ONE_DEVICE = {
    "sharding_type": "NamedSharding",
    "shape": [1],
    "axis_names": ["_"],
    "axis_types": ["AxisType.Auto"],
    "partition_spec": [],
    "device_mesh": {"mesh": [{"id": 0}]},
}


class _Leaf(NamedTuple):
    """A leaf, or a container without children, as Orbax lists it: the keys to it and their kinds, and its own kind."""

    keys: tuple[tuple[str, int], ...]
    kind: str
    entry: Entry | None

    @property
    def name(self) -> str:
        return ".".join(key for key, _ in self.keys)


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
    """Writes a folder and returns its size in bytes. Metrics and metadata go where Orbax has those of a step."""
    if options:
        raise MismatchError(f"format='orbax': expected no options of its own, found {', '.join(options)}")
    if UNFINISHED in posixpath.basename(path):
        raise UnsupportedError(
            f"{path}: Orbax treats a folder with {UNFINISHED!r} in its name as unfinished; choose another name"
        )
    leaves = list(_leaves(contents))
    _check(leaves)
    chunks = chunks_of(call, layouts, (leaf.entry for leaf in leaves))
    begun = time.time_ns()

    def arrays(folder: str) -> Writer:
        with Writer(store, folder, driver="zarr", ocdbt=True, call=call) as writer:
            for leaf in leaves:
                if isinstance(leaf.entry, ArrayEntry):
                    add_array(writer, leaf.name, leaf.entry, contents, chunks[leaf.entry.path])
                elif leaf.kind == "scalar":
                    add_number(writer, leaf.name, _value(leaf))
        return writer

    def rest(folder: str) -> None:
        _write_rest(store, folder, contents, leaves, chunks, begun)

    names = {*NAMES, *(part_of_database("", n) for n in range(call.count) if call.count > 1)}
    return write_folder(store, path, call, arrays, rest, overwrite=overwrite, owned=parts, names=names)


def _write_rest(
    store: Store, folder: str, contents: Source, leaves: Sequence[_Leaf], chunks: Mapping[str, Chunks], begun: int
) -> None:
    """Writes everything but the arrays."""
    _put(store, posixpath.join(folder, TREE), _tree(leaves))
    texts = {leaf.name: _value(leaf) for leaf in leaves if leaf.kind == "string"}
    if texts:
        _put(store, posixpath.join(folder, STRINGS), texts)
    on_device = [leaf for leaf in leaves if leaf.kind == "jax.Array"]
    if on_device:
        names = [base64.urlsafe_b64encode(leaf.name.encode()).decode() for leaf in on_device]
        _put(store, posixpath.join(folder, SHARDINGS), dict.fromkeys(names, json.dumps(_ONE_DEVICE)))
        store.make_folder(posixpath.join(folder, ABOUT_ARRAYS))
        about = {"array_metadatas": [_array(leaf, chunks) for leaf in on_device]}
        _put(store, posixpath.join(folder, ABOUT_ARRAYS, "process_0"), about)
    _put(store, posixpath.join(folder, CHECKPOINT), _checkpoint(contents, begun))
    _put(store, posixpath.join(folder, COMMITTED), "committed")


def _leaves(contents: Source) -> Iterator[_Leaf]:
    """The leaves and empty containers that Orbax lists of a tree, in order."""
    assert contents.skeleton is not None
    entries = iter(contents.entries.values())
    stack: list[tuple[tuple[str, int], ...]] = [()]
    for node in contents.skeleton:
        keys = stack.pop()
        if not isinstance(node, Node):
            entry = next(entries)
            yield _Leaf(keys, _kind(entry), entry)
        elif node.count():
            kind = SEQUENCE if node.kind in ("list", "tuple", "positional") else DICT
            stack += [(*keys, (split(key_text(key))[0], kind)) for key in reversed(node.children())]
        else:
            yield _Leaf(keys, _EMPTY.get(node.kind, "None"), None)


def _kind(entry: Entry) -> str:
    if isinstance(entry, ArrayEntry):
        return "np.ndarray" if entry.type.startswith("numpy") else "jax.Array"
    return "None" if entry.type in NO_ARRAY else "string" if entry.type == "str" else "scalar"


def _check(leaves: Sequence[_Leaf]) -> None:
    """Raises an `UnsupportedError` that names every leaf which Orbax cannot hold."""
    problems: list[str] = []
    names: dict[str, str] = {}
    for leaf in leaves:
        path = "/".join(key for key, _ in leaf.keys)
        if reason := _refused(leaf):
            problems.append(f"  {path or '(root)'}: {reason}")
        if leaf.kind not in _EMPTY.values() and leaf.kind != "None" and names.setdefault(leaf.name, path) != path:
            problems.append(
                f"  {path}: Orbax would store it under one name with {names[leaf.name]}; rename one of them"
            )
    if problems:
        raise UnsupportedError("\n".join(["format='orbax' cannot hold these leaves:", *problems]))


def _refused(leaf: _Leaf) -> str | None:
    if len(leaf.keys) > LEVELS:
        return f"it lies more than {LEVELS} levels deep"
    if isinstance(leaf.entry, ArrayEntry):
        dtype = leaf.entry.dtype
        return None if metadata.can_hold(dtype) else f"dtype {dtype}, which zarr has not"
    if leaf.kind != "scalar":
        return None
    value = _value(leaf)
    if type(value) is int:
        return None if -(1 << 63) <= value < 1 << 64 else "an int of more than 64 bits"
    return None if type(value) in (bool, float) else f"a {type(value).__name__}, which Orbax has not"


def _value(leaf: _Leaf) -> Any:
    assert isinstance(leaf.entry, ValueEntry)
    return leaf.entry.decode()


def _tree(leaves: Sequence[_Leaf]) -> Any:
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


def _array(leaf: _Leaf, chunks: Mapping[str, Chunks]) -> Any:
    assert isinstance(leaf.entry, ArrayEntry)
    shape = chunks[leaf.entry.path].shape
    key = {KEY: leaf.entry.impl} if leaf.entry.type == "key" else None
    about = {"param_name": leaf.name, "write_shape": leaf.entry.shape, "chunk_shape": shape, "ext_metadata": key}
    return {"array_metadata": about}


def _checkpoint(contents: Source, begun: int) -> Any:
    return {
        "item_handlers": _HANDLER,
        "metrics": dict(contents.metrics),
        "performance_metrics": {},
        "init_timestamp_nsecs": begun,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": contents.metadata if isinstance(contents.metadata, dict) else {},
    }


def _put(store: Store, path: str, value: Any) -> None:
    with file_of_new_folder(store, path) as file:
        file.write((value if isinstance(value, str) else json.dumps(value)).encode())
