"""Reads and writes the metadata that an Orbax `CheckpointManager` has for all steps of its run."""

import contextlib
import json
import logging
import posixpath
from collections.abc import Mapping
from typing import Any

from ...errors import CorruptError, ExistsError, UnsafeError
from ...stores.file_io import is_file
from ...stores.store import Store
from .schema import read_json

_FOLDER = "metadata"
_FILES = ("_ROOT_METADATA", "metadata")  # early releases: the latter
_log = logging.getLogger("treering")


def read(store: Store, run: str) -> Any:
    """Reads the metadata of a run; None if there is none. Logs it if they are damaged."""
    for name in _FILES:
        file = posixpath.join(run, _FOLDER, name)
        if is_file(store, file):
            try:
                found = read_json(store, file)
            except UnsafeError:
                raise
            except CorruptError as error:
                _log.warning("%s: opened without the metadata of the run: %s", run, error)
                return None
            if name == _FILES[0]:
                found = found.get("custom_metadata") if isinstance(found, dict) else None
            return found or None
    return None


def write(store: Store, run: str, metadata: Mapping[str, Any]) -> None:
    """Writes the metadata of a run that has none yet. Raises `TypeError` if they are not JSON."""
    data = json.dumps({"custom_metadata": dict(metadata)}).encode()
    folder = posixpath.join(run, _FOLDER)
    store.make_folders(folder, [])
    with (
        contextlib.suppress(ExistsError),  # An earlier job has written them.
        store.new_file(posixpath.join(folder, _FILES[0]), overwrite=False) as file,
    ):
        file.write(data)
