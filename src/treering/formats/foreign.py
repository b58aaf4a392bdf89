"""Building blocks for a format in another package; see "Formats of your own" in the guide.

>>> from treering.formats.foreign import ForeignReader, Runs, Store
"""

from ..stores.file_io import open_fetched, read_file
from ..stores.sequential import file_of_new_folder
from ..stores.store import Blob, Stat, Store, Writer
from ._shared.extents import Runs
from ._shared.reader import ForeignReader, Stored

__all__ = [
    "Blob",
    "ForeignReader",
    "Runs",
    "Stat",
    "Store",
    "Stored",
    "Writer",
    "file_of_new_folder",
    "open_fetched",
    "read_file",
]
