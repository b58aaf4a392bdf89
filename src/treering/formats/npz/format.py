"""Archives of NumPy (.npz), as `numpy.savez` and `numpy.savez_compressed` write them: a zip file of `.npy` files."""

from collections.abc import Collection, Sequence
from typing import Any

from ..._core.source import Source
from ...errors import UnsupportedError
from ...stores.file_io import opened
from ...stores.read_errors import refusal
from ...stores.store import Store

_MEMBER_MAGIC = b"PK\x03\x04"  # the beginning of the header before each member
_MAX_MEMBER_HEADER_BYTES = 30 + (1 << 16)  # bytes of such a header without its extra field, the maximum


class Npz:
    """Implements `treering.formats.Format` for NumPy's archives.

    A key is a path, and its slashes separate levels, as in safetensors files. A pickled object is an error with its
    name. Dtypes for which NumPy has no name are listed as in `EquinoxReader`. Reading an array up to its end checks its
    CRC-32.
    """

    name = "npz"
    suffixes: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()

    def refuses(self, store: Store, path: str) -> str | None:
        try:
            found = store.stat(path)
            if found is None or not found.is_file:
                return "there is nothing" if found is None else "not a file"
            with opened(store, path) as blob:
                begin = blob.read_up_to(len(_MEMBER_MAGIC))
                if begin != _MEMBER_MAGIC:
                    return "it does not begin as a zip file does"
                begin = blob.read_up_to(_MAX_MEMBER_HEADER_BYTES)
        except OSError as error:
            return refusal(error, path)
        name = begin[30 : 30 + int.from_bytes(begin[26:28], "little")]
        return None if name.endswith(b".npy") else "the first file in it is not .npy"

    def open(self, store: Store, path: str) -> Source:
        from .read import NpzReader

        return NpzReader(store, path)

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        return {}

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        return ()

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        raise UnsupportedError(f"{path}: archives of NumPy are only read; choose another format, such as safetensors")


FORMAT = Npz()
