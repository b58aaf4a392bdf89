"""Reading Levanter: whatever zarr arrays lie in a folder."""

import os
import re
import stat
from collections.abc import Iterator

from .._catalogue import ArrayEntry
from .._paths import key_text
from ..errors import CorruptError, UnsafeError
from ..stores.disk import Disk
from . import zarr
from .levanter import read_about
from .statedict import check_apart
from .zarr_leaves import ZarrReader, folder_size
from .zarr_metadata import FILES

_DRIVERS: dict[str, zarr.Driver] = {FILES["zarr"]: "zarr", FILES["zarr3"]: "zarr3"}
_LEVELS = 200  # of folders
_CHUNK = re.compile(r"[0-9]+(\.[0-9]+)*")  # the name of one


def open_checkpoint(disk: Disk, path: str) -> ZarrReader:
    """The reader of a folder. Raises `CorruptError` and `UnsupportedError`."""
    about = read_about(disk, path)
    found: dict[str, zarr.Array] = {}
    for folder, prefix, names in _folders(disk, path):
        for file, driver in _DRIVERS.items():
            own = [name.removesuffix(f"/{file}") for name in names if name.endswith(f"/{file}")]
            filled = folder.ocdbt and driver == "zarr3"
            for name, array in zip(own, folder.arrays(own, driver, filled=filled), strict=True):
                found["/".join(key_text(key) for key in (prefix + name).split("/"))] = array
    paths = sorted(found)
    check_apart(paths, path)
    return ZarrReader(
        "levanter",
        path,
        [ArrayEntry(name, "numpy", found[name].dtype, found[name].shape) for name in paths],
        found,
        step=about.step,
        metadata={"timestamp": about.timestamp, "is_temporary": about.is_temporary},
        nbytes=folder_size(disk, path),
        numbers_are_arrays=True,
    )


def _folders(disk: Disk, path: str) -> Iterator[tuple[zarr.Folder, str, list[str]]]:
    """Folders of arrays, what precedes the arrays' names there, and the files that describe them."""
    files: list[str] = []
    stack = [""]
    while stack:
        prefix = stack.pop()
        place = os.path.join(path, prefix)
        names = disk.list(place)
        if zarr.DATABASE in names:
            folder = zarr.Folder(place, ocdbt=True)
            yield folder, prefix, folder.list()
            continue
        described = [name for name in names if name in _DRIVERS]
        if described:
            files.append(prefix + described[0])
            continue
        folders = [name for name in names if _is_folder(disk, os.path.join(place, name))]
        if alone := [name for name in names if _CHUNK.fullmatch(name) and name not in folders]:
            raise CorruptError(f"{place}: expected what describes the array of the chunk {alone[0]}, found nothing")
        if prefix.count("/") > _LEVELS:
            raise UnsafeError(f"{place}: folders more than {_LEVELS} levels deep")
        stack += [f"{prefix}{name}/" for name in reversed(folders)]
    if files:
        yield zarr.Folder(path, ocdbt=False), "", files


def _is_folder(disk: Disk, path: str) -> bool:
    there = disk.stat(path)
    if there is None or not stat.S_ISDIR(there.st_mode):
        return False
    if os.path.islink(path):
        raise UnsafeError(f"{path}: expected a folder, found a link, which may lead out of the checkpoint")
    return True
