"""Pinned checkpoints, which are never deleted."""

import os

from ...errors import NotFoundError
from ...stores.posix import Disk
from ...stores.read_errors import reading
from .schema import MANIFEST, PIN


def pinned(disk: Disk, path: str) -> bool:
    """Whether a checkpoint is marked never to be deleted."""
    with reading(path):
        return disk.stat(os.path.join(path, PIN)) is not None


def pin(disk: Disk, path: str, wanted: bool) -> None:
    """Sets or removes the mark, durably. Raises `NotFoundError` when the checkpoint is deleted meanwhile."""
    mark = os.path.join(path, PIN)
    if wanted and not pinned(disk, path):
        try:
            disk.close(disk.create(mark))
            if disk.stat(os.path.join(path, MANIFEST)) is None:  # the process that deletes it missed the mark
                disk.unlink(mark)
                raise FileNotFoundError
        except FileNotFoundError:
            raise NotFoundError(f"{path}: expected a checkpoint to pin, but it was deleted meanwhile") from None
    elif not wanted and pinned(disk, path):
        disk.unlink(mark)
    disk.sync_dir(path)
