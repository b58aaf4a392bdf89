"""The tests that every format has to pass, for formats of other packages."""

from ._commits import Commits
from ._damage import Damage
from ._detection import Detection
from ._reading import Reading
from ._writing import Writing


class FormatConformance(Reading, Detection, Writing, Commits, Damage):
    """Inherit this under a name that pytest collects, and say what the format is and what it can hold.

    >>> class TestMine(FormatConformance):
    ...     format = MyFormat()
    ...     dtypes = ("float32", "int32")
    ...     keys = False

    `format` has to be said; all other declarations have defaults, those of a format that holds everything. What is
    declared has to come back bit for bit, what is not has to be refused by name: so a format that holds less says so
    with `dtypes`, `values`, `left_out`, `keys`, `names`, `empty`, `beside` and `numbers_are_arrays`; one that is only
    read with `writes = False` and a `make` of its own. Override `files` where a checkpoint is neither a file nor a
    folder, `small` where large arrays are stored in another way than small ones, and `wipe` where the bytes of an
    array are in no file as they are.

    The tests put doubles in the place of `treering.stores.of("")` and change nothing outside of pytest's `tmp_path`.
    """
