"""Weights of Keras: `model.save_weights` (.weights.h5, or .weights.json with shards) and `model.save` (.keras).

Treering reads them without Keras and without h5py. Other HDF5 files are read too, as trees of their groups.
"""

from ..._core.source import Source
from ...stores.file_io import opened
from ...stores.read_errors import refusal
from ...stores.store import Store
from .._shared.format_parts import ReadOnly
from .._shared.unknown_files import HDF5_MAGIC

_INDEX = ".weights.json"  # the ending of the name of an index of files
_ARCHIVE = ".keras"
_MEMBER_MAGIC = b"PK\x03\x04"  # the beginning of the header before each member of an archive
_HEADER_BYTES = 64


class Keras(ReadOnly):
    """Implements `treering.formats.Format` for Keras's weights.

    The groups of a file are the levels of the tree: ``layers/dense/vars/0``. Attributes, such as the name of each
    layer, are `metadata`, by path. Links, virtual datasets and objects of Python are refused by name.
    """

    name = "keras"
    contents = "Keras's weights"
    advice = "set the variables of a model with treering.keras.load, and write them with model.save_weights"

    def refuses(self, store: Store, path: str) -> str | None:
        try:
            found = store.stat(path)
            if found is None or not found.is_file:
                return "there is nothing" if found is None else "not a file"
            with opened(store, path) as blob:
                begin = blob.read_up_to(_HEADER_BYTES)
        except OSError as error:
            return refusal(error, path)
        if path.endswith(_INDEX):
            return None if begin.lstrip().startswith(b"{") else "it does not begin as JSON does"
        if path.endswith(_ARCHIVE) and begin.startswith(_MEMBER_MAGIC):
            return None
        return None if begin.startswith(HDF5_MAGIC) else "it does not begin as HDF5 does"

    def open(self, store: Store, path: str) -> Source:
        from . import read

        if path.endswith(_INDEX):
            return read.open_index(store, path)
        if path.endswith(_ARCHIVE):
            with opened(store, path) as blob:
                if blob.read_up_to(len(HDF5_MAGIC)) != HDF5_MAGIC:  # Keras 2 wrote HDF5 under such a name too.
                    return read.open_archive(store, path)
        return read.open_file(store, path)


FORMAT = Keras()
