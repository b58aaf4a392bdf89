"""Levanter: a folder ``step-{n}`` with a zarr array for each leaf and, written last, ``metadata.json``.

Where a leaf lies is its path: ``model/layers/0/weight``. Older releases write folders of zarr 2, newer ones one OCDBT
database of zarr 3, in which chunks of zeros are left out. No tree is recorded: numbers are arrays, and None and empty
containers are nowhere. Folders of zarr 2 are written, which all releases read.
"""

import datetime
import logging
import os
import re
import stat
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from ..errors import CorruptError
from ..stores.disk import Disk
from ..stores.on_disk import opened
from ..stores.reading import UnreadableError, reading, refusal
from . import Reader
from .orbax import CHECKPOINT, TREE

FILE = "metadata.json"
_MOST = 1 << 16  # bytes of that file
NAME = re.compile(r"step-([0-9]+)")
_log = logging.getLogger("treering")


class About(msgspec.Struct):
    """What ``metadata.json`` says. Temporary checkpoints go when there is a later one."""

    step: int
    timestamp: str
    is_temporary: bool = False

    def time(self) -> datetime.datetime:
        """When it was written, the beginning of time where that is not to be read."""
        try:
            time = datetime.datetime.fromisoformat(self.timestamp)
        except ValueError:
            time = datetime.datetime.min
        return time.replace(tzinfo=time.tzinfo or datetime.UTC)


class Levanter:
    """See `treering.formats.Format`."""

    name = "levanter"
    suffixes = ()
    boxes: tuple[str, ...] = ()

    def refuses(self, disk: Disk, path: str) -> str | None:
        try:
            there = disk.stat(path)
            if there is None:
                return "there is nothing"
            if not stat.S_ISDIR(there.st_mode):
                return "it is a file"
            if any(disk.stat(os.path.join(path, name)) for name in (CHECKPOINT, TREE)):
                return "it was written with Orbax"
            if disk.stat(os.path.join(path, FILE)) is None:
                return f"it is a folder without {FILE}"
            read_about(disk, path)
        except (CorruptError, OSError) as error:
            return refusal(error, path)
        return None

    def open(self, disk: Disk, path: str) -> Reader:
        from .levanter_read import open_checkpoint

        return open_checkpoint(disk, path)

    def steps(self, disk: Disk, folder: str, names: Sequence[str]) -> dict[int, str]:
        # In the order in which Levanter has looked for the latest one since May 2026: by step, time and path. Before
        # that, the time came first, which only shows in folders in which somebody went back to an earlier step.
        found: dict[int, tuple[datetime.datetime, str]] = {}
        for name in () if FILE in names else names:  # or else the folder is a checkpoint itself
            path = os.path.join(folder, name)
            try:
                if self.refuses(disk, path) is not None:  # or nobody may look
                    continue
                about = read_about(disk, path)
            except UnreadableError as error:  # and it is unknown which step it is
                _log.warning("left out of the steps of %s: %s", folder, error)
                continue
            found[about.step] = max((about.time(), name), found.get(about.step, (about.time(), name)))
        return {step: name for step, (_, name) in found.items()}

    def keeps(self, path: str, contents: Reader) -> Collection[str]:
        return ("step",) if own_metadata(contents) is None else ("step", "metadata")

    def write(self, disk: Disk, path: str, contents: Reader, *, overwrite: bool, **options: Any) -> int:
        from .levanter_write import write

        return write(disk, path, contents, options, overwrite=overwrite)


def own_metadata(contents: Reader) -> tuple[str, bool] | None:
    """Time stamp and whether it is temporary, of what Levanter wrote; None where there is other metadata, or none."""
    about = contents.metadata
    if not isinstance(about, dict) or about.keys() != {"timestamp", "is_temporary"}:
        return None
    timestamp, temporary = about["timestamp"], about["is_temporary"]
    return (timestamp, temporary) if type(timestamp) is str and type(temporary) is bool else None


def read_about(disk: Disk, path: str) -> About:
    """What is said of a checkpoint. Raises `CorruptError`."""
    file = os.path.join(path, FILE)
    with reading(file), opened(disk, file) as fd:
        buffer = bytearray(min(disk.size(fd), _MOST))
        data = bytes(buffer[: disk.read(fd, memoryview(buffer), 0)])
    try:
        about = msgspec.json.decode(data, type=About)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{file}: expected step and timestamp of a Levanter checkpoint: {error}") from None
    if about.step < 0:
        raise CorruptError(f"{file}: expected a step, found {about.step}")
    return about


FORMAT = Levanter()
