"""Files of PyTorch, as `torch.save` has written them since release 1.6: a zip file of a pickle and of storages.

Treering reads them without PyTorch, and runs nothing that is in them. The tree is that of the pickle: dicts, lists and
tuples around tensors, numbers and text.
"""

from collections.abc import Collection, Sequence
from typing import Any

from ..._core.source import Source
from ...errors import UnsupportedError
from ...stores.file_io import open_fetched, opened
from ...stores.read_errors import refusal
from ...stores.store import Store
from .schema import CHUNKS, NAME, PICKLE

_MEMBER_MAGIC = b"PK\x03\x04"  # the beginning of the header before each member
_HEADER_BYTES = 512  # bytes that are read: the header of the first member, with its name


class Torch:
    """Implements `treering.formats.Format` for files of PyTorch (.pt, .pth, .bin, .ckpt).

    An object of any other class than those of tensors and containers is left out by name, because only its own program
    could make it. A list that lacks such an item is a dict with its numbers. Attributes that a program has set on a
    tensor or an ordered dict are left out too. With `verify`, the first read of a tensor compares the checksum of its
    storage.
    """

    name = NAME
    suffixes: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()

    def refuses(self, store: Store, path: str) -> str | None:
        try:
            found = store.stat(path)
            if found is None or not found.is_file:
                return "there is nothing" if found is None else "not a file"
            if path.endswith(CHUNKS):
                return "a file of a distributed checkpoint; open its folder"
            with opened(store, path) as blob:
                begin = blob.read_up_to(_HEADER_BYTES)
        except OSError as error:
            return refusal(error, path)
        if not begin.startswith(_MEMBER_MAGIC):
            return "it does not begin as a zip file does"
        name = begin[30 : 30 + int.from_bytes(begin[26:28], "little")]
        return None if name.endswith(PICKLE.encode()) else "the first file in it is not data.pkl"

    def open(self, store: Store, path: str) -> Source:
        from .archive import Archive
        from .tree import Leaves, TorchReader

        file = open_fetched(store, path)
        archive = Archive(file, path)
        return TorchReader(NAME, path, Leaves(archive.value(), archive, path), nbytes=file.size)

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        return {}

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        return ()

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        raise UnsupportedError(f"{path}: files of PyTorch are only read; choose another format, such as safetensors")


FORMAT = Torch()
