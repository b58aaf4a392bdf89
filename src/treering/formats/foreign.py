"""The parts of which a format of another package can be built; see "Formats of your own" in the guide.

>>> from treering.formats.foreign import ForeignReader, Runs, new_file
"""

from ..stores.atomic import new_directory, new_file
from ..stores.posix import Disk
from ..stores.sequential import SequentialWriter
from ._shared.extents import File, Runs
from ._shared.reader import ForeignReader, Stored

__all__ = ["Disk", "File", "ForeignReader", "Runs", "SequentialWriter", "Stored", "new_directory", "new_file"]
