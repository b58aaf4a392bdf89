"""Files of PyTorch, as `torch.save` has written them since release 1.6: a zip file of a pickle and of storages.

Treering reads them without PyTorch, and runs nothing that is in them. The tree is that of the pickle: dicts, lists and
tuples around tensors, numbers and text.
"""

from ..._core.source import Source
from ...stores.file_io import open_fetched
from ...stores.store import Store
from .._shared.format_parts import ReadOnly, refuses_zip
from .._shared.unknown_files import TORCH_CHUNKS, TORCH_PICKLE


class Torch(ReadOnly):
    """Implements `treering.formats.Format` for files of PyTorch (.pt, .pth, .bin, .ckpt).

    An object of any other class than those of tensors, containers and NumPy's arrays is left out by name, because only
    its own program could make it. A list that lacks such an item is a dict with its numbers. Attributes that a program
    has set on a tensor or an ordered dict are left out too. With `verify`, the first read of a tensor compares the
    checksum of its storage.
    """

    name = "torch"
    contents = "files of PyTorch"

    def refuses(self, store: Store, path: str) -> str | None:
        if path.endswith(TORCH_CHUNKS):
            return "a file of a distributed checkpoint; open its folder"
        return refuses_zip(store, path, TORCH_PICKLE)

    def open(self, store: Store, path: str) -> Source:
        from .archive import Archive
        from .tree import TorchLeaves, TorchReader

        file = open_fetched(store, path)
        archive = Archive(file, path)
        return TorchReader("torch", path, TorchLeaves(archive.value(), archive, path), nbytes=file.size)


FORMAT = Torch()
