"""Archives of NumPy (.npz), as `numpy.savez` and `numpy.savez_compressed` write them: a zip file of `.npy` files."""

from ..._core.source import Source
from ...stores.store import Store
from .._shared.format_parts import ReadOnly, refuses_zip


class Npz(ReadOnly):
    """Implements `treering.formats.Format` for NumPy's archives.

    A key is a path, and its slashes separate levels, as in safetensors files. A pickled object is an error with its
    name. Dtypes for which NumPy has no name are listed as in `EquinoxReader`. Reading an array up to its end checks its
    CRC-32.
    """

    name = "npz"
    contents = "archives of NumPy"

    def refuses(self, store: Store, path: str) -> str | None:
        return refuses_zip(store, path, ".npy")

    def open(self, store: Store, path: str) -> Source:
        from .read import NpzReader

        return NpzReader(store, path)


FORMAT = Npz()
