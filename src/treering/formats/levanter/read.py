"""Reads Levanter's checkpoints: all zarr arrays in a folder."""

import logging
import os
import posixpath
import re
from collections.abc import Iterable, Iterator

from ..._core.entries import ArrayEntry, Entry, lost_entry
from ..._core.leaf_paths import key_text
from ...errors import CorruptError, UnsafeError
from ...stores.store import Store
from .._shared.safety import check_distinct
from .._zarr import array as zarr
from .._zarr.folder import DATABASE, Driver, Folder
from .._zarr.leaves import ZarrReader, folder_size
from .._zarr.metadata import FILES
from .schema import read_metadata

_DRIVERS: dict[str, Driver] = {FILES["zarr"]: "zarr", FILES["zarr3"]: "zarr3"}
_MAX_LEVELS = 200  # levels of folders
CHUNK = re.compile(r"[0-9]+(\.[0-9]+)*")  # a chunk's file name
_ARRAY_KEY = re.compile(r"(.*?)/(?:c(?:/[0-9]+)*|[0-9]+(?:\.[0-9]+)*)", re.DOTALL)  # a chunk's key, of zarr 3 or 2
_log = logging.getLogger("treering")


def open_checkpoint(store: Store, path: str) -> ZarrReader:
    """Opens a folder. Raises `CorruptError` and `UnsupportedError`."""
    about = read_metadata(store, path)
    entries: dict[str, Entry] = {}
    arrays: dict[str, zarr.Array] = {}
    for folder, prefix, names in _folders(store, path):
        for file, driver in _DRIVERS.items():
            own = [name.removesuffix(f"/{file}") for name in names if name.endswith(f"/{file}")]
            # JAX's serializer writes zarr 2 without a fill value, and zarr 3 with one.
            for name, array in zip(own, zarr.find(folder, own, driver, missing="metadata"), strict=True):
                place = _path(prefix + name)
                if isinstance(array, CorruptError):
                    entries[place] = lost_entry(place, str(array))
                else:
                    entries[place], arrays[place] = ArrayEntry(place, "numpy", array.dtype, array.shape), array
        for name in _without_metadata(names):
            place, file = _path(prefix + name), FILES["zarr3" if folder.ocdbt else "zarr"]
            why = "expected the metadata of the array that these chunks belong to, found nothing"
            entries.setdefault(place, lost_entry(place, f"{posixpath.join(folder.path, name, file)}: {why}"))
    paths = sorted(entries)
    check_distinct(paths, path)
    return ZarrReader(
        "levanter",
        path,
        [entries[name] for name in paths],
        arrays,
        step=about.step,
        metadata={"timestamp": about.timestamp, "is_temporary": about.is_temporary},
        nbytes=folder_size(store, path),
        numbers_are_arrays=True,
    )


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
        if described:
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
    """Returns the path of an array."""
    return "/".join(key_text(key) for key in name.split("/"))


def _is_folder(store: Store, path: str) -> bool:
    there = store.stat(path)
    if there is None or not there.is_folder:
        return False
    if store.is_link(path):
        raise UnsafeError(f"{path}: expected a folder, found a link, which may point outside the checkpoint")
    return True
