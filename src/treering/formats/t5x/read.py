"""Reads T5X: state dicts that contain arrays, or TensorStore specs of zarr arrays in the same folder."""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box
from ..._core.entries import ArrayEntry
from ..._threads.python_gc import gc_paused
from ...errors import CorruptError, UnsupportedError
from ...stores.file_io import open_fetched
from ...stores.store import Store
from .._shared import data_iterators
from .._shared.msgpack import named
from .._shared.safety import check_inside
from .._shared.state_dict import Elsewhere, StateDict, numbered, own_step
from .._zarr import array as zarr
from .._zarr.folder import Folder
from .._zarr.leaves import ZarrReader, folder_size
from .schema import FILE, SPEC, VERSIONS

_STORES = ("file", "gfile", "gcs")  # different names of the same storage; the folder may have been moved since
_BFLOAT16 = {"uint16": "bfloat16"}  # how version 2 stores bfloat16


def open_state(store: Store, path: str, file: str, step: int | None, *, without_zeros: bool = False) -> ZarrReader:
    """Opens the state dict in the file `checkpoint`, or in a file of another name. `step` comes from the path.

    without_zeros: True if missing chunks are zeros.
    """
    opened, folder = open_fetched(store, file), os.path.dirname(file)
    arrays = functools.cache(lambda: Folder(store, folder, ocdbt=False))
    seen_as: dict[str, str] = {}
    zarr_nbytes = 0

    def find(leaf: str, value: Any) -> Elsewhere | CorruptError | None:
        nonlocal zarr_nbytes
        if type(value) is not dict or not value.keys() >= set(SPEC):
            return None
        name = _name(value)
        check_inside(folder, name)
        # Specs before TensorStore 0.1.14 have the path outside.
        missing: zarr.Missing = "fill" if without_zeros or "path" in value else "doubt"
        (array,) = zarr.find(arrays(), [name], "zarr", missing=missing)
        if isinstance(array, CorruptError):
            return array
        if difference := _difference(value, array, seen_as):
            return CorruptError(difference)
        zarr_nbytes += folder_size(store, array.path)
        return Elsewhere(seen_as.get(array.dtype, array.dtype), array.shape, array)

    scanned = StateDict(opened, find=find, seen_as=seen_as)
    with gc_paused():
        tree = scanned.value_of_range(0, opened.size)
    if type(tree) is dict:
        complete = tree.keys() == {"version", "optimizer"}
        version = tree.pop("version") if complete or next(iter(tree), None) == "version" else 0  # else a leaf
        if type(version) is not int or version not in VERSIONS:
            raise UnsupportedError(f"{file}: expected version 0, 2 or 3 of T5X's files, found {named(version)}")
        # The calls of `find` below see this change.
        seen_as.update(_BFLOAT16 if version == 2 else {})
        tree = tree["optimizer"] if tree.keys() == {"optimizer"} else tree
    with gc_paused():
        leaves = scanned.leaves(tree)
    step = own_step(leaves, "state/step") if step is None else step
    nbytes = opened.size + zarr_nbytes
    return _T5XReader(
        "t5x-without-zeros" if without_zeros else "t5x",
        path,
        leaves.entries,
        leaves.arrays,
        skeleton=leaves.skeleton,
        step=step,
        nbytes=nbytes,
        numbers_are_arrays=True,
        # A file of another name does not have the folder to itself, so other files in it are unrelated.
        left_out=data_iterators.describe_process_files(store, folder) if os.path.basename(file) == FILE else (),
    )


class _T5XReader(ZarrReader):
    """Names the leaf in errors about its files; views zarr arrays as another dtype of the same size if needed."""

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, mmap: bool | None = None
    ) -> list[np.ndarray]:
        try:
            found = super().read(wanted, verify=verify, mmap=mmap)
        except (CorruptError, UnsupportedError) as error:
            raise type(error)(f"{self.path}: {self._leaf(str(error))}: {error}") from None
        return [array.view(dtypes.to_numpy(entry.dtype)) for array, (entry, _) in zip(found, wanted, strict=True)]

    def _leaf(self, message: str) -> str:
        """Returns the leaf whose file a message begins with."""
        places = {path: array.path for path, array in self._arrays.items() if isinstance(array, zarr.Array)}
        return next((path for path, place in places.items() if message.startswith((place + "/", place + ":"))), FILE)


def _name(spec: Mapping[Any, Any]) -> str:
    """Returns the name of the array that a spec describes, within the folder of the file."""
    kvstore = spec["kvstore"]
    if type(kvstore) is not dict:
        raise CorruptError(f"expected a TensorStore spec with a kvstore, found {named(kvstore)}")
    if spec["driver"] != "zarr" or kvstore.get("driver") not in _STORES:
        drivers = f"{spec['driver']!r:.100} in {kvstore.get('driver')!r:.100}"
        raise UnsupportedError(f"expected a zarr array in {', '.join(_STORES)}, found {drivers}")
    path = spec.get("path", kvstore.get("path"))
    if type(path) is not str or not path.strip("/"):
        raise CorruptError(f"expected the path of a zarr array, found {named(path)}")
    return path.removesuffix("/")


def _difference(spec: Mapping[Any, Any], array: zarr.Array, seen_as: Mapping[str, str]) -> str | None:
    """Returns the difference between an array and its spec, or None. Chunks and compression may differ.

    Raises `UnsupportedError` for a spec with a transform.
    """
    metadata = spec["metadata"]
    shape = metadata.get("shape") if type(metadata) is dict else None
    shape = numbered(shape) or shape  # Flax writes lists as maps by default
    if shape is not None and shape != list(array.shape):
        return f"expected the shape {shape!r:.100} in {array.path}, found {list(array.shape)}"
    dtype = spec.get("dtype", array.dtype)
    if dtype not in (array.dtype, seen_as.get(array.dtype)):
        return f"expected {dtype!r:.100} in {array.path}, found {array.dtype}"
    transform = spec.get("transform")
    if transform is not None and not _is_identity(transform, array.shape):
        raise UnsupportedError(
            f"expected {array.path} without a transform, which Treering cannot apply, found {transform!r:.200}"
        )
    return None


def _is_identity(transform: Any, shape: Sequence[int]) -> bool:
    """Returns True if a TensorStore transform leaves the array unchanged."""
    if type(transform) is not dict:
        return False
    # TensorStore wraps implicit bounds in a list.
    plain = {
        key: [one[0] if type(one) is list and len(one) == 1 else one for one in value] if type(value) is list else value
        for key, value in transform.items()
        if key != "input_labels"
    }
    outputs = [{"input_dimension": axis} for axis in range(len(shape))]
    expected = {
        "input_rank": len(shape),
        "input_inclusive_min": [0] * len(shape),
        "input_exclusive_max": list(shape),
        "input_shape": list(shape),
        "output": outputs,
    }
    return all(expected.get(key) == value for key, value in plain.items())
