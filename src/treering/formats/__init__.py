"""One module per format, behind two small protocols, and the registry of them.

A format knows files and what is in them. It never knows about templates, meshes or managers. What it reads is a
catalogue of leaves by path and their contents on request; what it writes is given to it as just that.
"""

import datetime
import importlib
import os
import stat
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .._catalogue import ArrayEntry, Entry, ValueEntry
from .._paths import few
from .._sharding import Box
from .._tree import Skeleton
from ..errors import MismatchError, UnsupportedError
from ..stores import lfs
from ..stores.disk import Disk
from ..stores.looks import warn_of_closed
from ..stores.reading import UnreadableError, reading
from . import kinds

if TYPE_CHECKING:
    import numpy as np

# What a format of somebody else's is made of.
__all__ = [
    "ArrayEntry",
    "Box",
    "Entry",
    "Format",
    "Problem",
    "Reader",
    "Skeleton",
    "ValueEntry",
    "get",
    "names",
    "register",
]


def __dir__() -> list[str]:
    return __all__


class Problem(NamedTuple):
    """Damage: the file, the leaves it touches, and the number of the 1 MiB block (None: the file as a whole)."""

    file: str
    leaves: tuple[str, ...]
    block: int | None
    what: str

    def __str__(self) -> str:
        place = self.file if self.block is None else f"{self.file}, block {self.block}"
        return f"{place}: {self.what}" + (f" (leaves: {few(self.leaves)})" if self.leaves else "")


class Reader(Protocol):
    """An open checkpoint of some format: a catalogue of entries by path, and their contents on request.

    `skeleton` is None where the format records no tree.
    """

    @property
    def format(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def entries(self) -> Mapping[str, Entry]: ...
    @property
    def skeleton(self) -> Skeleton | None: ...
    @property
    def step(self) -> int | None: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def metadata(self) -> Any: ...
    @property
    def nbytes(self) -> int: ...

    @property
    def created(self) -> datetime.datetime | None:
        """When the checkpoint was committed, in UTC, where that is known."""
        ...

    @property
    def identity(self) -> str:
        """What changes when the checkpoint is replaced by another, where that is known."""
        ...

    @property
    def positional(self) -> bool:
        """Whether leaves have no names, but only numbers: they are those of a template, in order."""
        ...

    @property
    def numbers_are_arrays(self) -> bool:
        """Whether Python's numbers were saved as arrays without axes, so that a template's `float` takes such a one."""
        ...

    @property
    def untold(self) -> frozenset[str]:
        """Paths of arrays of `uint8` whose dtype may be any of that size: only a template knows."""
        ...

    def check_present(self) -> None:
        """Raises `CorruptError` unless every file is there in its full size, as far as that can be told at a glance."""
        ...

    def sharding(self, entry: ArrayEntry) -> dict[str, Any] | None:
        """How an array was spread when it was saved, where that is known."""
        ...

    def maps(self, wish: bool | None) -> bool:
        """Whether arrays come as views of the mapped files, which take no memory."""
        ...

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, map: bool | None = None
    ) -> "list[np.ndarray]":
        """The boxes of the arrays, each in memory that is the caller's to change."""
        ...

    def problems(self) -> Iterator[Problem]:
        """Reads every byte and yields all damage."""
        ...


class Format(Protocol):
    """A kind of checkpoint. Formats of other packages are added with `register`."""

    @property
    def name(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """File name endings by which a destination is known to be meant for this format: ``(".eqx",)``."""
        ...

    @property
    def boxes(self) -> tuple[str, ...]:
        """Kinds of boxes around leaves that its library shows as levels: "variable" (NNX), "axis-metadata" (Linen)."""
        ...

    def refuses(self, disk: Disk, path: str) -> str | None:
        """Why what lies at a path is not of this format; None when it is. Looks, but reads no more than a header."""
        ...

    def open(self, disk: Disk, path: str) -> Reader:
        """Opens a checkpoint that is of this format. Raises `CorruptError` and `UnsupportedError`."""
        ...

    def steps(self, disk: Disk, folder: str, names: Sequence[str]) -> dict[int, str]:
        """The complete checkpoints of a run, by step: which of the names in the folder they are."""
        ...

    def keeps(self, path: str, contents: Reader) -> Collection[str]:
        """Which of ``step``, ``metrics`` and ``metadata``, as the contents have them, come back from a path.

        What is not kept and was given for the save is refused before anything is written; what a copied checkpoint has
        of it is left out, with a line in the log.
        """
        ...

    def write(self, disk: Disk, path: str, contents: Reader, *, overwrite: bool, **options: Any) -> int:
        """Writes a checkpoint in one step and returns its size in bytes.

        Raises `UnsupportedError`, before anything is written, for what the format cannot hold, naming each leaf.
        """
        ...


ABOUT = ("step", "metrics", "metadata")  # what is recorded beside a tree

# In the order in which they are tried. Each module has an object `FORMAT`; it is imported when it is first needed.
_MODULES = {
    "treering": "treering.formats.treering",
    "t5x": "treering.formats.t5x",
    "fjformer": "treering.formats.fjformer",
    "safetensors": "treering.formats.safetensors_files",  # of a model in several formats that of most libraries
    "flax": "treering.formats.flax",
    "equinox": "treering.formats.equinox",
    "tensorflow": "treering.formats.tensorflow",
    "orbax": "treering.formats.orbax",
    "levanter": "treering.formats.levanter",
}
_registered: dict[str, Format] = {}
_ALIASES = {"easylm": "fjformer"}


def register(format: Format) -> None:
    """Adds a format of one's own, or puts it in the place of one of the same name."""
    _registered[format.name] = format


def names() -> list[str]:
    """The names of all formats."""
    return list(dict.fromkeys([*_MODULES, *_registered]))


def get(name: str) -> Format:
    """A format by name. Raises `MismatchError` that lists the known ones."""
    name = _ALIASES.get(name, name)
    if name not in _registered and name in _MODULES:
        _registered[name] = importlib.import_module(_MODULES[name]).FORMAT
    if name not in _registered:
        raise MismatchError(f"format={name!r}: expected one of {', '.join(map(repr, names()))}")
    return _registered[name]


def for_path(path: str, name: str | None) -> Format:
    """The format to write a path in: the named one, else what its suffix says, else the native one."""
    if name is not None:
        return get(name)
    return next((get(n) for n in names() if path.endswith(get(n).suffixes)), get("treering"))


def detect(disk: Disk, path: str) -> Format:
    """The format of what lies at a path.

    Raises `UnsupportedError` that says what else it is, and why each of them refuses it; `CorruptError` for pointers of
    git-lfs and what cannot be read, which may be anything.
    """
    reasons: list[str] = []
    for name in names():
        with reading(path):
            reason = get(name).refuses(disk, path)
        if reason is None:
            return get(name)
        reasons.append(f"  {name}: {reason}")
    for ending in ("", ".index"):  # TensorFlow's are named by what the names of their files begin with
        lfs.check_all(disk, path + ending, levels=2)
    what = kinds.described(disk, path)
    head = f"{path}: " + (f"{what}; " if what else "") + "of no format that is known here:"
    raise UnsupportedError("\n".join([head, *reasons]))


def is_known(disk: Disk, path: str) -> bool:
    """Whether a checkpoint of any format lies at a path, or what cannot be read and may be one."""
    return any(accepts(get(name), disk, path) for name in names())


def is_foreign(disk: Disk, path: str) -> bool:
    """Whether what lies at a path is a checkpoint that another library wrote, or may be one and cannot be read."""
    return any(name != "treering" and accepts(get(name), disk, path) for name in names())


def accepts(format: Format, disk: Disk, path: str) -> bool:
    """Whether what lies at a path is of a format, or cannot be read, which is found when it is opened."""
    try:
        with reading(path):
            return format.refuses(disk, path) is None
    except UnreadableError:
        return True


def is_step(format: Format, disk: Disk, path: str) -> bool:
    """The same, of a directory that is called like a step. Raises `PermissionError` when it cannot be looked into."""
    if accepts(format, disk, path):
        return True
    disk.stat(os.path.join(path, "."))
    return False


def may_be_file(disk: Disk, path: str) -> bool:
    """Whether a regular file is at a path, or what cannot be looked at, which is found when it is opened."""
    try:
        with reading(path):
            found = disk.stat(path)
    except UnreadableError:
        return True
    return found is not None and stat.S_ISREG(found.st_mode)


def _steps(format: Format, disk: Disk, folder: str, listed: Sequence[str]) -> dict[int, str]:
    """The steps of one format, without what cannot be looked into."""
    try:
        return format.steps(disk, folder, listed)
    except PermissionError:
        open_ones: list[str] = []
    for name in listed:
        try:
            format.steps(disk, folder, [name])
            open_ones.append(name)
        except PermissionError as error:
            warn_of_closed(os.path.join(folder, name), error.strerror)
    return format.steps(disk, folder, open_ones)


def foreign_steps(disk: Disk, folder: str, ours: Container[str] = ()) -> dict[int, str]:
    """The steps that other libraries have left in a folder, and their paths; `ours` are names that are known."""
    found: dict[int, str] = {}
    with reading(folder):
        listed = [name for name in disk.list(folder) if name not in ours]
        for name in names():
            if name != "treering":
                found = {**_steps(get(name), disk, folder, listed), **found}
    return {step: os.path.join(folder, name) for step, name in found.items()}
