"""Trees of Orbax's first releases: a state dict in MessagePack, which mentions the zarr arrays beside it."""

import os
from typing import Any

from ..stores.disk import Disk
from . import zarr
from .orbax import PLACEHOLDER, STATE
from .orbax_tree import Tree
from .runs import File
from .statedict import Elsewhere, StateDict, check_inside


def read_state(disk: Disk, folder: str, at: str | None) -> Tree:
    """The tree in a folder, as it lies at a path or (None) as the root. Raises `CorruptError`."""
    file = File(disk, os.path.join(folder, STATE))
    ocdbt = disk.stat(os.path.join(folder, zarr.DATABASE)) is not None
    arrays = zarr.Folder(folder, ocdbt=ocdbt)

    def find(path: str, value: Any) -> Elsewhere | None:
        if type(value) is not str or not value.startswith(PLACEHOLDER):
            return None
        name = value.removeprefix(PLACEHOLDER)
        if not ocdbt:
            check_inside(folder, name)
        (array,) = arrays.arrays([name], "zarr")
        return Elsewhere(array.dtype, array.shape, array)

    scanned = StateDict(file, find=find)
    leaves = scanned.leaves(scanned.whole(0, file.size), at)
    return Tree(leaves.entries, leaves.arrays, list(leaves.skeleton))
