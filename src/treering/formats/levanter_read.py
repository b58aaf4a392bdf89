"""Reading Levanter: whatever zarr arrays lie in a folder."""

import os
import stat
from collections.abc import Iterator

from .._catalogue import ArrayEntry
from .._paths import key_text
from ..errors import UnsafeError
from ..stores.disk import Disk
from . import zarr
from .levanter import read_about
from .orbax_tree import DATABASE
from .statedict import check_apart
from .zarr_leaves import ZarrReader, folder_size
from .zarr_metadata import FILES

_DRIVERS: dict[str, zarr.Driver] = {FILES["zarr"]: "zarr", FILES["zarr3"]: "zarr3"}
_LEVELS = 200  # of folders


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
    )


def _folders(disk: Disk, path: str) -> Iterator[tuple[zarr.Folder, str, list[str]]]:
    """Folders of arrays, what precedes the arrays' names there, and the files that describe them."""
    files: list[str] = []
    stack = [""]
    while stack:
        prefix = stack.pop()
        place = os.path.join(path, prefix)
        names = disk.list(place)
        if DATABASE in names:
            folder = zarr.Folder(place, ocdbt=True)
            yield folder, prefix, folder.list()
            continue
        described = [name for name in names if name in _DRIVERS]
        if described:
            files.append(prefix + described[0])
            continue
        if prefix.count("/") > _LEVELS:
            raise UnsafeError(f"{place}: folders more than {_LEVELS} levels deep")
        for name in reversed(names):
            there = disk.stat(os.path.join(place, name))
            if there is not None and stat.S_ISDIR(there.st_mode):
                if os.path.islink(os.path.join(place, name)):
                    raise UnsafeError(
                        f"{os.path.join(place, name)}: expected a folder, found a link, which may lead out"
                    )
                stack.append(f"{prefix}{name}/")
    if files:
        yield zarr.Folder(path, ocdbt=False), "", files
