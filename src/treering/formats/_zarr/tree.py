"""Finds all zarr arrays in a folder, which are a tree: the path of a leaf is the name of the array's folder."""

import logging
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from ..._core.entries import ArrayEntry, Entry, lost_entry
from ..._core.leaf_paths import key_text
from ...errors import CorruptError, UnsafeError
from ...stores.file_io import is_file, read_file
from ...stores.store import Store
from . import array as zarr
from .folder import DATABASE, MAX_METADATA_BYTES, Driver, Folder
from .metadata import FILES

_DRIVERS: dict[str, Driver] = {FILES["zarr"]: "zarr", FILES["zarr3"]: "zarr3"}
GROUP = ".zgroup"  # the metadata of a group in zarr 2
_MAX_LEVELS = 200  # levels of folders
CHUNK = re.compile(r"[0-9]+(\.[0-9]+)*")  # a chunk's file name
_ARRAY_KEY = re.compile(r"(.*?)/(?:c(?:/[0-9]+)*|[0-9]+(?:\.[0-9]+)*)", re.DOTALL)  # a chunk's key, of zarr 3 or 2
_log = logging.getLogger("treering")


class ZarrTree(NamedTuple):
    entries: list[Entry]
    arrays: Mapping[str, zarr.Array]


def read_tree(store: Store, path: str, missing: zarr.Missing) -> ZarrTree:
    """Opens all arrays in a folder and the folders and databases in it. `missing` says what a missing chunk means.

    Raises `UnsupportedError` for arrays that Treering does not read. An array without metadata is a lost entry.
    """
    entries: dict[str, Entry] = {}
    arrays: dict[str, zarr.Array] = {}
    for folder, prefix, names in _folders(store, path):
        for file, driver in _DRIVERS.items():
            own = [posixpath.dirname(name) for name in names if posixpath.basename(name) == file]
            for name, array in zip(own, zarr.find(folder, own, driver, missing=missing), strict=True):
                place = _path(prefix + name)
                if isinstance(array, CorruptError):
                    entries[place] = lost_entry(place, str(array))
                else:
                    entries[place], arrays[place] = ArrayEntry(place, "numpy", array.dtype, array.shape), array
        for name in _without_metadata(names):
            place, file = _path(prefix + name), FILES["zarr3" if folder.ocdbt else "zarr"]
            why = "expected the metadata of the array that these chunks belong to, found nothing"
            entries.setdefault(place, lost_entry(place, f"{posixpath.join(folder.path, name, file)}: {why}"))
    return ZarrTree([entries[name] for name in sorted(entries)], arrays)


def read_group(store: Store, folder: str) -> dict[str, Any] | None:
    """Returns the attributes of a zarr group; None if the folder is not one, or its metadata cannot be read."""
    if is_file(store, posixpath.join(folder, GROUP)):
        return _read_map(store, posixpath.join(folder, ".zattrs"))
    found = _read_map(store, posixpath.join(folder, FILES["zarr3"]))
    attributes = found.get("attributes")
    return (attributes if isinstance(attributes, dict) else {}) if found.get("node_type") == "group" else None


def _read_map(store: Store, path: str) -> dict[str, Any]:
    """Returns the map in a file of JSON; an empty one for anything else."""
    there = store.stat(path)
    if there is None or not there.is_file or there.nbytes > MAX_METADATA_BYTES:
        return {}
    try:
        return msgspec.json.decode(read_file(store, path), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def _folders(store: Store, path: str) -> Iterator[tuple[Folder, str, list[str]]]:
    """Yields folders of arrays, the prefix of the arrays' names, and the keys of metadata and chunks in them."""
    files: list[str] = []
    stack = [""]
    while stack:
        prefix = stack.pop()
        place = posixpath.join(path, prefix)
        names = store.list(place)
        if DATABASE in names:
            folder = Folder(store, place, ocdbt=True)
            yield folder, prefix, folder.list()
            continue
        described = [name for name in names if name in _DRIVERS]
        if described and read_group(store, place) is None:
            files.append(prefix + described[0])
            continue
        folders = [name for name in names if _is_folder(store, posixpath.join(place, name))]
        # One chunk is enough to show that the metadata of its array is missing.
        files += [prefix + name for name in names if CHUNK.fullmatch(name) and name not in folders][:1]
        if not names:
            _log.warning("%s: skipped an empty folder; if it was an array, that is lost", place.rstrip("/"))
        if prefix.count("/") > _MAX_LEVELS:
            raise UnsafeError(f"{place}: folders more than {_MAX_LEVELS} levels deep")
        stack += [f"{prefix}{name}/" for name in reversed(folders)]
    if files:
        yield Folder(store, path, ocdbt=False), "", files


def _without_metadata(names: Iterable[str]) -> Iterator[str]:
    """Yields the names of arrays that have chunks and no metadata."""
    described = {os.path.dirname(name) for name in names if os.path.basename(name) in _DRIVERS}
    arrays = dict.fromkeys(found[1] for name in names if (found := _ARRAY_KEY.fullmatch(name)))
    for name in arrays:
        keys = name.split("/")
        if not any("/".join(keys[:n]) in described for n in range(len(keys) + 1)):
            yield name


def _path(name: str) -> str:
    """Returns the path of an array, "" for the folder itself."""
    return "/".join(key_text(key) for key in name.split("/")) if name else ""


def _is_folder(store: Store, path: str) -> bool:
    there = store.stat(path)
    if there is None or not there.is_folder:
        return False
    if store.is_link(path):
        raise UnsafeError(f"{path}: expected a folder, found a link, which may point outside the checkpoint")
    return True
