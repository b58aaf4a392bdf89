"""Which checkpoints may be moved, replaced or deleted: those of which nothing is of a later version of the format."""

import contextlib
import os

from ..._threads.gc import paused
from ...errors import CorruptError, UnsupportedError
from ...stores.local import MANIFEST
from ...stores.on_disk import read_file
from ...stores.posix import Disk
from ...stores.reading import UnreadableError
from . import files, manifest, metrics
from .manifest import file_names

__all__ = ["check_removable", "file_names"]


def check_removable(disk: Disk, path: str) -> None:
    """Raises `UnsupportedError` when a checkpoint, or a part of it, is of a later version; what is damaged may go.

    The manifest is decoded as a whole, and of the array files the headers are read. Metrics are looked at last, for
    they may be added at any time.
    """
    name = os.path.join(path, MANIFEST)
    try:
        data = read_file(disk, name)
        with paused():  # three times as fast
            found = manifest.decode(data, name)
    except (CorruptError, FileNotFoundError, NotADirectoryError):
        return
    manifest.check_known(found, name)
    for file in found.files:
        files.check_version(disk, os.path.join(path, file.name), file)
    with contextlib.suppress(UnreadableError):
        for _, late in metrics.read(disk, path, manifest.xxh3(data)):
            if isinstance(late, UnsupportedError):
                raise late
