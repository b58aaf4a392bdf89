"""The tests that every format must pass. Authors of formats in other packages run them too."""

from ._commits import Commits
from ._damage import Damage
from ._detection import Detection
from ._reading import Reading
from ._writing import Writing


class FormatConformance(Reading, Detection, Writing, Commits, Damage):
    """The tests of a format. Subclass it under a name that pytest collects, and declare what the format can store.

    >>> class TestMine(FormatConformance):
    ...     format = MyFormat()
    ...     dtypes = ("float32", "int32")
    ...     keys = False

    Only `format` is required. The defaults of all other declarations are those of a format that can store everything.
    The tests expect that declared leaves are read bit for bit, and that a save refuses all others and names them.

    - A format that can store less declares it with `dtypes`, `values`, `left_out`, `keys`, `names`, `empty`, `fields`
      and `numbers_are_arrays`.
    - A format that Treering cannot write has `writes = False` and its own `make`.
    - Override `files` if a checkpoint is neither a file nor a folder, `small` if large arrays are stored in another way
      than small ones, and `wipe` if no file has the plain bytes of an array.

    The tests replace `treering.stores.get("")` by test doubles and change nothing outside of pytest's `tmp_path`.
    """
