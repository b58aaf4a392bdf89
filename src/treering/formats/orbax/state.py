"""State dicts in MessagePack that Orbax wrote until 2024: entire trees, or only the aggregated leaves of one.

Some text in them stands for zarr arrays in the same folder.
"""

import posixpath

from ..._core.entries import ArrayEntry, Entry, ValueEntry, lost_entry
from ...errors import CorruptError
from ...stores.file_io import open_fetched
from ...stores.store import Store
from .._shared.reader import Stored
from .._shared.safety import check_inside
from .._shared.state_dict import Leaves, StateDict
from .._zarr import array as zarr
from .._zarr.folder import DATABASE, Folder
from .schema import PLACEHOLDERS, STATE


def read_aggregated(store: Store, folder: str, at: str | None) -> Leaves:
    """Reads the leaves of the state dict in a folder, placed at a path or (None) as the root. Raises `CorruptError`.

    Text that stands for an array stays text, see `placeholder`.
    """
    file = open_fetched(store, posixpath.join(folder, STATE))
    scanned = StateDict(file)
    return scanned.leaves(scanned.value_of_range(0, file.size), at)


def read_state(store: Store, folder: str, at: str | None) -> Leaves:
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
    return Leaves(list(entries.values()), stored, leaves.skeleton)


def placeholder(entry: Entry) -> str | None:
    """Returns the name of the array that a leaf of text stands for; None for all other leaves."""
    if not isinstance(entry, ValueEntry) or entry.type != "str":
        return None
    text = entry.decode()
    prefix = next((prefix for prefix in PLACEHOLDERS if text.startswith(prefix)), None)
    return None if prefix is None else text.removeprefix(prefix)
