"""Reads the description of a tree of arrays from Orbax's `_METADATA` or, if that is gone, from the arrays' names."""

import posixpath
from collections.abc import Mapping
from typing import Any

import msgspec

from ..._threads.preload_decoders import preload_decoders
from ...errors import CorruptError
from ...stores.store import Store
from .._zarr import metadata
from .._zarr.folder import DATABASE, Folder
from .schema import TREE, read_json

SEQUENCE, DICT = 1, 2  # kinds of keys; attributes have the latter, too
STRINGS = "_strings.json"


class _Key(msgspec.Struct):
    key: str
    key_type: int


class _ValueKind(msgspec.Struct):
    value_type: str
    skip_deserialize: bool = False
    write_shape: Any = None  # also in the array's entry in `ARRAY_META`, so it proves that there was one


class LeafMetadata(msgspec.Struct):
    """Describes a leaf, or a container without children: the keys to it, and its kind."""

    key_metadata: list[_Key]
    value_metadata: _ValueKind


class TreeFile(msgspec.Struct):
    """Describes all leaves of a tree and how they are stored, as far as Orbax recorded it."""

    tree_metadata: dict[str, LeafMetadata]
    use_ocdbt: bool | None = None
    use_zarr3: bool | None = None
    store_array_data_equal_to_fill_value: bool | None = None  # True since 0.10
    custom_metadata: Any = None


preload_decoders(TreeFile)


def read_metadata(store: Store, folder: str) -> TreeFile:
    """Reads the `_METADATA` of a folder. Raises `CorruptError`."""
    file = posixpath.join(folder, TREE)
    try:
        return msgspec.convert(read_json(store, file), TreeFile)
    except (msgspec.ValidationError, RecursionError) as error:
        raise CorruptError(f"{file}: {error}") from None


def guess_metadata(store: Store, folder: str) -> TreeFile:
    """Builds a tree of dicts from the arrays and texts in a folder, whose names consist of their keys.

    Raises `CorruptError` if there are no arrays, or arrays of both versions of zarr.
    """
    ocdbt = store.stat(posixpath.join(folder, DATABASE)) is not None
    if ocdbt:
        keys = Folder(store, folder, ocdbt=True).list()
    else:
        files = [posixpath.join(name, file) for name in store.list(folder) for file in metadata.FILES.values()]
        keys = [file for file in files if store.stat(posixpath.join(folder, file)) is not None]
    by_driver = {
        driver: [name for key in keys if (name := key.removesuffix(f"/{file}")) != key]
        for driver, file in metadata.FILES.items()
    }
    if all(by_driver.values()) or not any(by_driver.values()):
        raise CorruptError(f"{posixpath.join(folder, TREE)}: expected the list of the tree's leaves, found nothing")
    kinds = {name: "np.ndarray" for names in by_driver.values() for name in names}
    kinds |= dict.fromkeys(read_texts(store, folder), "string")
    leaves = {
        name: LeafMetadata([_Key(key, DICT) for key in name.split(".")], _ValueKind(kind))
        for name, kind in sorted(kinds.items())
    }
    # Without the list, nothing says that the writer left out chunks.
    return TreeFile(leaves, ocdbt, bool(by_driver["zarr3"]), store_array_data_equal_to_fill_value=True)


def read_texts(store: Store, folder: str) -> Mapping[str, Any]:
    """Reads the leaves of a tree that are text, by name. Raises `CorruptError`."""
    file = posixpath.join(folder, STRINGS)
    found = read_json(store, file) if store.stat(file) is not None else {}
    if not isinstance(found, dict):
        raise CorruptError(f"{file}: expected a map of texts")
    return found
