"""One module per format, behind two small protocols, and the registry of them.

A format knows files and what is in them. It never knows about templates, meshes or managers. What it reads is a
catalogue of leaves by path and their contents on request; what it writes is given to it as just that.
"""

import importlib
import os
import stat
from collections.abc import Collection, Container, Sequence
from typing import Any, Protocol

from .._core.boxes import Box
from .._core.entries import ArrayEntry, Entry, ValueEntry
from .._core.skeleton import Skeleton
from .._core.source import Problem, Source
from ..errors import MismatchError, UnsupportedError
from ..stores import git_lfs
from ..stores.nfs import warn_of_closed
from ..stores.posix import Disk
from ..stores.read_errors import UnreadableError, reading
from ._shared import kinds

# What a format of somebody else's is made of.
__all__ = [
    "ArrayEntry",
    "Box",
    "Entry",
    "Format",
    "Problem",
    "Skeleton",
    "Source",
    "ValueEntry",
    "get",
    "names",
    "register",
]


def __dir__() -> list[str]:
    return __all__


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

    def open(self, disk: Disk, path: str) -> Source:
        """Opens a checkpoint that is of this format. Raises `CorruptError` and `UnsupportedError`."""
        ...

    def steps(self, disk: Disk, folder: str, names: Sequence[str]) -> dict[int, str]:
        """The complete checkpoints of a run, by step: which of the names in the folder they are."""
        ...

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        """Which of ``step``, ``metrics`` and ``metadata``, as the contents have them, come back from a path.

        What is not kept and was given for the save is refused before anything is written; what a copied checkpoint has
        of it is left out, with a line in the log.
        """
        ...

    def write(self, disk: Disk, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        """Writes a checkpoint in one step and returns its size in bytes.

        Raises `UnsupportedError`, before anything is written, for what the format cannot hold, naming each leaf.
        """
        ...


# In the order in which they are tried. Each module has an object `FORMAT`; it is imported when it is first needed.
_MODULES = {
    "treering": "treering.formats.treering.format",
    "t5x": "treering.formats.t5x.format",
    "fjformer": "treering.formats.fjformer.format",
    "safetensors": "treering.formats.safetensors.format",  # of a model in several formats that of most libraries
    "flax": "treering.formats.flax.format",
    "equinox": "treering.formats.equinox.format",
    "tensorflow": "treering.formats.tensorflow.format",
    "orbax": "treering.formats.orbax.format",
    "levanter": "treering.formats.levanter.format",
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
        git_lfs.check_all(disk, path + ending, levels=2)
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
