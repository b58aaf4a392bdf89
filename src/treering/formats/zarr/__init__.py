"""The format zarr: any folder or OCDBT database of zarr arrays, as zarr-python, xarray and TensorStore write them.

The names of the arrays are the paths. Checkpoints of JAX's ``pytree_serialization`` have a file with the paths instead.
A missing chunk has the fill value, as zarr defines it. In zarr 2, an array may have no fill value; then a missing chunk
is damage.

Only ``format="zarr"`` reads it: nothing in such a folder shows that it is complete, and checkpoints of Orbax, T5X and
Levanter that were never finished look like one.
"""

from ..._core.source import Source
from ...errors import UnsupportedError
from ...stores.read_errors import refusal
from ...stores.store import Store
from .. import accepts, get, names
from .._shared.format_parts import ReadOnly
from .._shared.unknown_files import describe_zarr


class Zarr(ReadOnly):
    """Implements `treering.formats.Format` for zarr."""

    name = "zarr"
    contents = "zarr arrays"

    def refuses(self, store: Store, path: str) -> str | None:
        try:
            if store.stat(path) is None:
                return "there is nothing"
            for name in names():
                if name != self.name and accepts(get(name), store, path):
                    return f"it is a checkpoint of the format {name}"
            return None if describe_zarr(store, path) else "it is not a folder of zarr arrays"
        except OSError as error:
            return refusal(error, path)

    def open(self, store: Store, path: str) -> Source:
        from .._zarr.leaves import ZarrReader, folder_size
        from .._zarr.tree import read_group, read_tree
        from .jax_tree import has_tree, read_jax_tree

        if has_tree(store, path):
            of_jax = read_jax_tree(store, path)
            size = folder_size(store, path)
            return ZarrReader("zarr", path, of_jax.entries, of_jax.arrays, skeleton=of_jax.skeleton, nbytes=size)
        tree = read_tree(store, path, "metadata")
        if not tree.entries:
            raise UnsupportedError(f"{path}: expected a folder of zarr arrays, found none")
        about, nbytes = read_group(store, path) or None, folder_size(store, path)
        return ZarrReader(
            "zarr", path, tree.entries, tree.arrays, metadata=about, nbytes=nbytes, numbers_are_arrays=True
        )


FORMAT = Zarr()
