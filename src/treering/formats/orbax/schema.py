"""Names of files in Orbax's folders, and reading their JSON."""

import itertools
import json
import posixpath
import re
from typing import Any

from ...errors import CorruptError, UnsafeError
from ...stores.file_io import is_file, read_file
from ...stores.store import Store
from .. import get
from .._shared.msgpack import MAP, STR, beginning, tokens

CHECKPOINT = "_CHECKPOINT_METADATA"
TREE = "_METADATA"
STATE = "checkpoint"  # early releases wrote this instead of `_METADATA`; later ones keep aggregated leaves in it
PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")  # the beginnings of text in it that stands for an array
SHARDINGS = "_sharding"
ARRAY_META = "array_metadatas"  # a folder with one file for each process
ARRAY_META_FILE = re.compile(r"process_\d+")  # the names of those files
_METADATA_OF_ARRAYS = (".zarray", "zarr.json")
COMMITTED = "commit_success.txt"
COMMIT_TIME = "commit_timestamp_nsecs"
DATABASE = "manifest.ocdbt"
DELETED = "_CHECKPOINT_DELETION"  # names the item that Orbax is deleting, until it is gone
UNFINISHED = ".orbax-checkpoint-tmp"
MAX_METADATA_BYTES = 16 << 20  # bytes of the file about a checkpoint; it is read to decide whether a folder is one
STEP = re.compile(r"((?:.+_)?)([0-9]+)", re.DOTALL)
# With this sharding, Orbax restores a JAX array that has no mesh on the first device of any kind.
ONE_DEVICE: dict[str, Any] = {
    "sharding_type": "NamedSharding",
    "shape": [1],
    "axis_names": ["_"],
    "axis_types": ["AxisType.Auto"],
    "partition_spec": [],
    "device_mesh": {"mesh": [{"id": 0}]},
}


def tree_file(store: Store, folder: str) -> str | None:
    """Returns the file in a folder that describes its tree; None if there is none."""
    if is_file(store, posixpath.join(folder, TREE)):
        return TREE
    data = beginning(store, posixpath.join(folder, STATE), 1 << 16)
    if any(prefix.encode() in data for prefix in PLACEHOLDERS):
        return STATE
    # T5X has a state dict in a file of this name, too.
    first = [kind for kind, _ in itertools.islice(tokens(data), 2)]
    return STATE if first == [MAP, STR] and get("t5x").refuses(store, folder) is not None else None


def has_arrays(store: Store, folder: str) -> bool:
    """Returns True if a folder contains the arrays of a tree, in a database or in files."""
    return any(store.stat(posixpath.join(folder, name)) is not None for name in (DATABASE, ARRAY_META)) or any(
        store.stat(posixpath.join(folder, name, file)) is not None
        for name in store.list(folder)
        for file in _METADATA_OF_ARRAYS
    )


def read_checkpoint_metadata(store: Store, path: str) -> Any:
    """Reads the file about a checkpoint. Raises `CorruptError`, or `UnsafeError` if it is too large."""
    file = posixpath.join(path, CHECKPOINT)
    there = store.stat(file)
    if there is not None and there.nbytes > MAX_METADATA_BYTES:
        raise UnsafeError(f"{file}: {there.nbytes} bytes, more than the description of a checkpoint can have")
    return read_json(store, file)


def deleted_item(store: Store, path: str) -> Any:
    """Reads the name of the item that Orbax is deleting, or was when it was killed; None if there is none."""
    file = posixpath.join(path, DELETED)
    found = read_json(store, file) if store.stat(file) is not None else {}
    if not isinstance(found, dict):
        raise CorruptError(f"{file}: expected a map")
    return found.get("checkpointable_name")


def read_json(store: Store, path: str) -> Any:
    """Reads a JSON file, which may contain NaN. Raises `CorruptError`, or `UnsafeError` for extreme nesting."""
    try:
        return json.loads(read_file(store, path))
    except FileNotFoundError:
        raise CorruptError(f"{path}: expected a file of JSON, found nothing") from None
    except RecursionError:
        raise UnsafeError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise CorruptError(f"{path}: expected JSON: {error}") from None
