"""Reads checkpoints of `jax.experimental.array_serialization.pytree_serialization`.

``array_store`` is a database of arrays, named by the numbers of the leaves. ``pytreedef.json`` has the tree as a
FlatBuffer, and a description of each leaf. Chunks of zeros are left out. Named tuples become dicts. Nodes of other
classes have numbered children.
"""

import base64
import posixpath
import re
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from ..._core.entries import ArrayEntry, Entry, ValueEntry, lost_entry
from ..._core.leaf_paths import join, key_text
from ..._core.skeleton import LEAF, Node
from ..._core.values import encode
from ..._threads.preload_decoders import preload_decoders
from ...errors import CorruptError, UnsupportedError
from ...stores.file_io import is_file, read_file
from ...stores.store import Store
from .._zarr import array as zarr
from .._zarr.folder import Driver, Folder
from .._zarr.metadata import FILES

FILE = "pytreedef.json"
_STORE = "array_store"
_KINDS = ("leaf", "none", "tuple", "list", "dict", "custom")  # JAX's numbers of the kinds of nodes
_KIND, _CHILDREN, _KEYS, _ABOUT = 4, 6, 8, 12  # places of fields in the table of a node
_ARRAY = re.compile(r"Array\((\w+)\[([0-9, ]*)\]\)")


class _TreeFile(msgspec.Struct):
    tree: str = msgspec.field(name="__jax_pytreedef_repr")
    leaves: list[str | None] = msgspec.field(name="__jax_leaf_ids")


preload_decoders(_TreeFile)


class JaxTree(NamedTuple):
    entries: list[Entry]
    arrays: dict[str, zarr.Array]
    skeleton: list[Node | int]


def has_tree(store: Store, path: str) -> bool:
    return is_file(store, posixpath.join(path, FILE))


def read_jax_tree(store: Store, path: str) -> JaxTree:
    """Opens the arrays of a checkpoint. Raises `CorruptError` and `UnsupportedError`."""
    file, place = posixpath.join(path, FILE), posixpath.join(path, _STORE)
    try:
        found = msgspec.json.decode(read_file(store, file), type=_TreeFile)
        paths, skeleton = _nodes(base64.b64decode(found.tree, validate=True))
    except (ValueError, IndexError, struct.error, RecursionError) as error:  # also errors of msgspec, base64 and UTF-8
        raise CorruptError(f"{file}: expected the tree of a checkpoint of JAX: {error}") from None
    if len(paths) != len(found.leaves):
        raise CorruptError(f"{file}: expected {len(paths)} leaves, found {len(found.leaves)}")
    numbers = [n for n, about in enumerate(found.leaves) if about not in (None, "null")]
    arrays = dict(zip(numbers, _arrays(store, place, numbers) if numbers else (), strict=True))
    tree = JaxTree([], {}, skeleton)
    for n, (name, about) in enumerate(zip(paths, found.leaves, strict=True)):
        if n not in arrays:
            tree.entries.append(ValueEntry(name, *encode(None)))
            continue
        array = _checked(arrays[n], str(about), file)
        if isinstance(array, CorruptError):
            tree.entries.append(lost_entry(name, str(array)))
        else:
            tree.entries.append(ArrayEntry(name, "jax", array.dtype, array.shape))
            tree.arrays[name] = array
    return tree


def _arrays(store: Store, place: str, numbers: Sequence[int]) -> list[zarr.Array | CorruptError]:
    folder = Folder(store, place, ocdbt=True)
    # Users may choose the version of zarr, for each array.
    keys = {*folder.list()}
    old = {n for n in numbers if f"{n}/{FILES['zarr']}" in keys}
    found: dict[int, zarr.Array | CorruptError] = {}
    groups: list[tuple[Driver, list[int]]] = [("zarr", sorted(old)), ("zarr3", [n for n in numbers if n not in old])]
    for driver, some in groups:
        found |= zip(some, zarr.find(folder, [str(n) for n in some], driver, missing="metadata"), strict=True)
    return [found[n] for n in numbers]


def _checked(array: zarr.Array | CorruptError, about: str, file: str) -> zarr.Array | CorruptError:
    """Returns an array, or an error if it is not the one that the file describes."""
    described = _ARRAY.fullmatch(about)
    if described is None:
        raise UnsupportedError(f"{file}: expected descriptions of arrays, found {about!r:.100}")
    if isinstance(array, CorruptError):
        return array
    shape = ", ".join(map(str, array.shape))
    if (described[1], described[2]) == (array.dtype, shape):
        return array
    return CorruptError(f"{file}: expected {about!r:.100} in {array.path}, found {array.dtype}[{shape}]")


def _nodes(data: bytes) -> tuple[list[str], list[Node | int]]:
    """Returns the paths of the leaves, and the skeleton, of a FlatBuffer. Raises `ValueError` and `struct.error`."""
    paths: list[str] = []
    skeleton: list[Node | int] = []
    stack: list[tuple[str, bool, int]] = [("", True, _unsigned(data, 0))]
    while stack:
        path, root, table = stack.pop()
        if len(skeleton) > len(data):  # so one node stands in several places
            raise ValueError("more nodes than bytes")
        kind = _field(data, table, _KIND)
        name = _KINDS[data[kind]] if kind else "leaf"
        if name in ("leaf", "none"):
            # JAX stores None as a leaf. A node that is None would have no number.
            if name == "none":
                raise ValueError("a node that is None")
            paths.append(path)
            skeleton.append(LEAF)
            continue
        children = _vector(data, table, _CHILDREN)
        keys: Sequence[Any] = _fields(data, table) if name == "custom" else ()
        if name == "dict" or (keys and len(keys) == len(children)):
            keys = keys or [_text(data, place) for place in _vector(data, table, _KEYS)]
            if len({*keys}) != len(children):
                raise ValueError(f"{len(keys)} keys of {len(children)} children")
            skeleton.append(Node("dict", "", [*keys]))
        else:
            keys = range(len(children))
            skeleton.append(Node("positional" if name == "custom" else name, "", len(children)))
        inner = zip(keys, children, strict=True)
        stack += [(join(path, key_text(key), root=root), False, child) for key, child in reversed([*inner])]
    return paths, skeleton


def _unsigned(data: bytes, at: int) -> int:
    """Returns the place that the offset at a place leads to."""
    return at + struct.unpack_from("<I", data, at)[0]


def _field(data: bytes, table: int, slot: int) -> int:
    """Returns the place of a field of a table; 0 if the table does not have it."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    if fields < 0 or slot >= struct.unpack_from("<H", data, fields)[0]:
        return 0
    offset = struct.unpack_from("<H", data, fields + slot)[0]
    return table + offset if offset else 0


def _vector(data: bytes, table: int, slot: int) -> list[int]:
    """Returns the places that the elements of a vector lead to."""
    field = _field(data, table, slot)
    if not field:
        return []
    start = _unsigned(data, field)
    count = struct.unpack_from("<I", data, start)[0]
    if count * 4 > len(data):
        raise ValueError(f"a vector of {count} elements")
    return [_unsigned(data, start + 4 + 4 * n) for n in range(count)]


def _fields(data: bytes, table: int) -> list[str]:
    """Returns the fields of a named tuple, which JAX stores as JSON; none for another class."""
    field = _field(data, table, _ABOUT)
    try:
        return msgspec.json.decode(_bytes(data, _unsigned(data, field)), type=list[str]) if field else []
    except msgspec.MsgspecError:
        return []


def _text(data: bytes, at: int) -> str:
    return _bytes(data, at).decode()


def _bytes(data: bytes, at: int) -> bytes:
    size = struct.unpack_from("<I", data, at)[0]
    if at + 4 + size > len(data):
        raise ValueError(f"a text of {size} bytes")
    return data[at + 4 : at + 4 + size]
