"""Reads Levanter's checkpoints: all zarr arrays in a folder."""

from ...stores.store import Store
from .._zarr.leaves import ZarrReader, folder_size
from .._zarr.tree import read_tree
from .schema import read_metadata


def open_checkpoint(store: Store, path: str) -> ZarrReader:
    """Opens a folder. Raises `CorruptError` and `UnsupportedError`."""
    about = read_metadata(store, path)
    # JAX's serializer writes zarr 2 without a fill value, and zarr 3 with one.
    tree = read_tree(store, path, "metadata")
    return ZarrReader(
        "levanter",
        path,
        tree.entries,
        tree.arrays,
        step=about.step,
        metadata={"timestamp": about.timestamp, "is_temporary": about.is_temporary},
        nbytes=folder_size(store, path),
        numbers_are_arrays=True,
    )
