"""Names of files in Orbax's folders, and their JSON."""

import itertools
import json
import posixpath
import re
from typing import Any

from ...errors import CorruptError, UnsafeError
from ...stores.store import Store
from ...stores.whole_files import is_file, read_file
from .. import get
from .._shared.msgpack import MAP, STR, beginning, tokens

CHECKPOINT = "_CHECKPOINT_METADATA"
TREE = "_METADATA"
STATE = "checkpoint"  # used instead in the first releases, and later with aggregated leaves
PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")  # with which text in it begins that stands for an array
SHARDINGS = "_sharding"
ABOUT_ARRAYS = "array_metadatas"  # a folder of files, one from each process
ABOUT_ARRAY = re.compile(r"process_\d+")  # what those are called
_METADATA_OF_ARRAYS = (".zarray", "zarr.json")
COMMITTED = "commit_success.txt"
COMMIT_TIME = "commit_timestamp_nsecs"
DATABASE = "manifest.ocdbt"
UNFINISHED = ".orbax-checkpoint-tmp"
MAX_METADATA_BYTES = 16 << 20  # bytes of the file about the checkpoint, which is read to tell whether there is one
STEP = re.compile(r"((?:.+_)?)([0-9]+)", re.DOTALL)


def tree_file(store: Store, folder: str) -> str | None:
    """The file in a folder that says which tree lies there, None where there is none."""
    if is_file(store, posixpath.join(folder, TREE)):
        return TREE
    data = beginning(store, posixpath.join(folder, STATE), 1 << 16)
    if any(prefix.encode() in data for prefix in PLACEHOLDERS):
        return STATE
    first = [kind for kind, _ in itertools.islice(tokens(data), 2)]
    return STATE if first == [MAP, STR] and get("t5x").refuses(store, folder) is not None else None


def has_arrays(store: Store, folder: str) -> bool:
    """Whether arrays of a tree lie in a folder, in a database or in files."""
    return any(store.stat(posixpath.join(folder, name)) is not None for name in (DATABASE, ABOUT_ARRAYS)) or any(
        store.stat(posixpath.join(folder, name, file)) is not None
        for name in store.list(folder)
        for file in _METADATA_OF_ARRAYS
    )


def read_about(store: Store, path: str) -> Any:
    """The contents of the file about the checkpoint as a whole. Raises `CorruptError`."""
    file = posixpath.join(path, CHECKPOINT)
    there = store.stat(file)
    if there is not None and there.nbytes > MAX_METADATA_BYTES:
        raise UnsafeError(f"{file}: {there.nbytes} bytes, which cannot be meant as a description of a checkpoint")
    return read_json(store, file)


def read_json(store: Store, path: str) -> Any:
    """The contents of a JSON file, in which there may be NaN. Raises `CorruptError`."""
    try:
        return json.loads(read_file(store, path))
    except FileNotFoundError:
        raise CorruptError(f"{path}: expected a file of JSON, found nothing") from None
    except RecursionError:
        raise UnsafeError(f"{path}: nested deeper than can be meant") from None
    except ValueError as error:
        raise CorruptError(f"{path}: expected JSON: {error}") from None
