"""Reads and writes Levanter's checkpoints: a folder of zarr arrays; last comes the file that marks completion."""

import datetime
import os
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..._core.calls import Call
from ..._core.describe import drop_code
from ..._core.entries import NO_ARRAY, ArrayEntry, Entry
from ..._core.layouts import Layout
from ..._core.leaf_paths import split
from ..._core.source import Source
from ...errors import ExistsError, MismatchError, UnsupportedError
from ...stores.file_io import is_folder
from ...stores.sequential import file_of_new_folder
from ...stores.store import Store
from .._zarr import metadata
from .._zarr.folder import DATABASE
from .._zarr.leaves import ZarrReader, add_array, add_number, chunks_of, folder_size, parts_of_arrays
from .._zarr.parallel_write import Folders, write_folder
from .._zarr.tree import CHUNK, read_tree
from .._zarr.writer import ZarrWriter
from ..orbax.schema import CHECKPOINT, TREE
from .schema import FILE, NAME, LevanterMetadata, own_metadata, read_metadata

_MAX_NAME_BYTES = 255  # bytes of a folder's name


def open_checkpoint(store: Store, path: str) -> ZarrReader:
    """Opens a folder. Raises `CorruptError` and `UnsupportedError`."""
    about = read_metadata(store, path)
    # JAX's serializer writes zarr 2 without a fill value, and zarr 3 with one.
    tree = read_tree(store, path, "metadata")
    return ZarrReader(
        "levanter",
        path,
        tree.entries,
        tree.arrays,
        step=about.step,
        metadata={"timestamp": about.timestamp, "is_temporary": about.is_temporary},
        nbytes=folder_size(store, path),
        numbers_are_arrays=True,
    )


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
    """Writes a folder and returns its size in bytes. A missing step is taken from the folder's name, or is 0."""
    if options:
        raise MismatchError(f"format='levanter': expected no options, found {', '.join(options)}")
    entries = [entry for entry in contents.entries.values() if entry.type not in NO_ARRAY]
    _check(entries)
    names = {FILE, CHECKPOINT, TREE, DATABASE, *metadata.FILES.values()}
    names |= {"/".join(split(entry.path)).partition("/")[0] for entry in entries}
    chunks = chunks_of(call, layouts, entries)

    def begin(folder: str) -> None:
        folders = Folders(store, folder, path)
        for entry in entries:
            folders.add("/".join(split(entry.path)))

    def arrays(folder: str) -> list[ZarrWriter]:
        with ZarrWriter(store, folder, driver="zarr", ocdbt=False, call=call) as writer:
            for entry in entries:
                name = "/".join(split(entry.path))
                if isinstance(entry, ArrayEntry):
                    add_array(writer, name, entry, contents, chunks[entry.path])
                else:
                    add_number(writer, name, entry.decode())
        return [writer]

    def rest(folder: str) -> None:
        named = NAME.fullmatch(os.path.basename(path))
        step = contents.step if contents.step is not None else int(named[1]) if named else 0
        timestamp, temporary = own_metadata(contents) or (datetime.datetime.now().isoformat(), False)
        with file_of_new_folder(store, posixpath.join(folder, FILE)) as file:
            file.write(msgspec.json.encode(LevanterMetadata(step, timestamp, temporary)))

    return write_folder(
        store,
        path,
        call,
        arrays,
        rest,
        begin=begin,
        overwrite=overwrite,
        owned=_owned,
        names=names,
        check_others=_check_others,
    )


def _owned(store: Store, folder: str) -> set[str]:
    """Returns the files that Levanter wrote for a step: those of all arrays in its folder."""
    return {FILE, *parts_of_arrays(store, folder, lambda: open_checkpoint(store, folder))}


def _check_others(store: Store, folder: str, others: Sequence[str]) -> None:
    """Raises `ExistsError` for other files that a reader would take for parts of the checkpoint."""
    for name in others:
        place = posixpath.join(folder, name)
        if CHUNK.fullmatch(name) or (store.is_link(place) and is_folder(store, place, links=True)):
            raise ExistsError(
                f"{place}: expected nothing next to a Levanter checkpoint that a reader would take for an array, "
                "found a link to a folder, or a file with a chunk's name; write to another path, or move it"
            )


def _check(entries: list[Entry]) -> None:
    """Raises an `UnsupportedError` that names every leaf which Levanter cannot hold."""
    reasons = [(entry.path, _refused(entry)) for entry in entries]
    if problems := [f"  {path or '(root)'}: {reason}" for path, reason in reasons if reason]:
        raise UnsupportedError("\n".join(["format='levanter' cannot hold these leaves:", *problems]))


def _refused(entry: Entry) -> str | None:
    keys = split(entry.path)
    if any(not key or set(key) & set("./\\\0") or len(key.encode()) > _MAX_NAME_BYTES for key in keys):
        return f"keys become folder names of at most {_MAX_NAME_BYTES} bytes without slashes and dots; rename it"
    if isinstance(entry, ArrayEntry):
        if entry.type == "key":
            return f"a typed PRNG key; store jax.random.key_data(key) instead, or {drop_code(entry.path)}"
        return None if metadata.can_hold(entry.dtype) else f"dtype {entry.dtype}, which zarr cannot hold"
    value = entry.decode()
    if type(value) is int:
        return None if -(1 << 63) <= value < 1 << 64 else "an int of more than 64 bits"
    return (
        None
        if type(value) in (bool, float, complex)
        else f"a {type(value).__name__}, which is not a number; {drop_code(entry.path)}"
    )
