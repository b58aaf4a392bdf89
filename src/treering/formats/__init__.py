"""One module per format, behind two small protocols, and the registry of them.

A format knows files and their contents. It never knows about templates, meshes or Checkpointers. It reads a
checkpoint as a `Source`: leaves by path and their contents on request; it is given a `Source` to write.
"""

import importlib
import logging
import posixpath
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from .._core.boxes import Box
from .._core.entries import ArrayEntry, Entry, ValueEntry
from .._core.skeleton import Skeleton
from .._core.source import Problem, Share, Source
from ..errors import MismatchError, UnsupportedError
from ..stores import git_lfs
from ..stores.nfs import warn_of_closed
from ..stores.read_errors import UnreadableError, reading
from ..stores.store import Store
from ..stores.whole_files import is_folder, opened
from ._shared import kinds

if TYPE_CHECKING:
    from .._processes.calls import Call
    from .._processes.layouts import Layout

_log = logging.getLogger("treering")

# The names that a format of another package needs.
__all__ = [
    "ArrayEntry",
    "Box",
    "Entry",
    "Format",
    "JointFormat",
    "Problem",
    "Share",
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
    """A kind of checkpoint. Formats of other packages are added with `register`.

    A format may also have a method `damaged_steps(store, folder, names)`. It returns the steps, by number, that have
    the names and the files of its steps and are too damaged for `refuses` to recognize them.
    """

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

    def refuses(self, store: Store, path: str) -> str | None:
        """The reason why a path is not of this format; None when it is. Reads no more than a header."""
        ...

    def open(self, store: Store, path: str) -> Source:
        """Opens a checkpoint that is of this format. Raises `CorruptError` and `UnsupportedError`."""
        ...

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        """The complete checkpoints of a run by step: their names, of those given in the folder."""
        ...

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        """Those of ``step``, ``metrics`` and ``metadata``, as the contents have them, that come back from a path.

        A save is refused before anything is written if the caller gave one that is not kept; one that a copied
        checkpoint has is left out, which is logged.
        """
        ...

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        """Writes a checkpoint in one step and returns its size in bytes.

        Raises `UnsupportedError`, before anything is written, that names each leaf which the format cannot hold; and
        for a checkpoint that would not open as this format.
        """
        ...


@runtime_checkable
class JointFormat(Format, Protocol):
    """A format of which several processes of a job can write one checkpoint, each its part of the arrays."""

    def splits(self, entry: ArrayEntry) -> bool:
        """Whether an array can be written in parts, of which each process has some."""
        ...

    def write_together(
        self,
        store: Store,
        path: str,
        contents: Source,
        call: "Call",
        layouts: "Mapping[str, Layout]",
        *,
        overwrite: bool,
        **options: Any,
    ) -> int:
        """Writes a checkpoint, together with the other processes of a call, and returns its size; see `write`.

        layouts: the processes that have the parts of an array, by path; the others are whole in each process. A part
        that this process does not have can't be read.
        """
        ...


_Find = Callable[[Store, str, Sequence[str]], dict[int, str]]


class StepPath(NamedTuple):
    """Where a step of a run is. `format` is set where it is not recognized: by the caller, or for a damaged step."""

    path: str
    format: str | None = None


# In the order in which they are tried. Each module has an object `FORMAT`; it is imported when it is first needed.
_MODULES = {
    "treering": "treering.formats.treering.format",
    "t5x": "treering.formats.t5x.format",
    "fjformer": "treering.formats.fjformer.format",
    "safetensors": "treering.formats.safetensors.format",  # a model in several formats: most libraries have this one
    "flax": "treering.formats.flax.format",
    "equinox": "treering.formats.equinox.format",
    "npz": "treering.formats.npz.format",
    "tensorflow": "treering.formats.tensorflow.format",
    "orbax": "treering.formats.orbax.format",
    "levanter": "treering.formats.levanter.format",
}
_registered: dict[str, Format] = {}
_looked = False  # for what is installed
LOOK = 1 << 16  # bytes of a file that is too damaged to be recognized
_SINGLE_FILES = {"fjformer", "safetensors", "flax", "equinox", "tensorflow"}  # a folder of these is one by its files
_ALIASES = {"easylm": "fjformer"}


def __getattr__(name: str) -> Any:
    if name == "t5_names":  # imported when it is first needed, as the formats are
        return importlib.import_module(".t5_names", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(format: Format) -> None:
    """Adds a format of another package, or replaces the one of the same name.

    Packages that are installed may offer one without that, as an entry point of the group ``treering.formats``.
    """
    _registered[format.name] = format


def _register_installed() -> None:
    """Adds the formats that installed packages offer as entry points, once.

    One that fails, or has the name of a shipped one, is logged and left out.
    """
    global _looked
    if _looked:
        return
    import importlib.metadata  # which is large, and seldom needed to open a checkpoint

    _looked = True  # first: a package may ask for the formats that there are while it is imported
    for point in importlib.metadata.entry_points(group="treering.formats"):
        if point.name in _MODULES or point.name in _registered:
            continue  # what the program itself has registered counts
        try:
            format = point.load()
            if format.name in _MODULES:  # or what a file is would depend on whether anyone had looked
                raise MismatchError(f"the name {format.name!r} is that of a format of Treering's own")
            register(format)
        except Exception as error:  # of another package, without which all else goes on
            _log.warning("the format %r of %s is not there, for loading it failed: %r", point.name, point.value, error)


def names() -> list[str]:
    """The names of all formats: the shipped ones, those that were registered, and those of installed packages."""
    _register_installed()
    return list(dict.fromkeys([*_MODULES, *_registered]))


def _each() -> Iterator[Format]:
    """All formats, in the order in which they are tried; those of installed packages are looked for last."""
    for name in _MODULES:
        yield get(name)
    for name in names()[len(_MODULES) :]:
        yield get(name)


def get(name: str) -> Format:
    """A format by name. Raises a `MismatchError` that lists the known ones."""
    name = _ALIASES.get(name, name)
    if name not in _registered and name in _MODULES:
        _registered[name] = importlib.import_module(_MODULES[name]).FORMAT
    if name not in _registered:
        _register_installed()
    if name not in _registered:
        raise MismatchError(f"format={name!r}: expected one of {', '.join(map(repr, names()))}")
    return _registered[name]


def for_path(path: str, name: str | None) -> Format:
    """The format to write a path in: the named one, else what its suffix says, else the native one."""
    if name is not None:
        return get(name)
    return next((get(n) for n in names() if path.endswith(get(n).suffixes)), get("treering"))


def detect(store: Store, path: str) -> Format:
    """The format of the checkpoint at a path.

    Raises an `UnsupportedError` that says what else it is, and why each format refuses it; `CorruptError` for pointers
    of git-lfs and unreadable files, which may be anything.
    """
    reasons: list[str] = []
    with reading(path), store.glance(path):  # they ask for the same
        for format in _each():
            with reading(path):
                reason = format.refuses(store, path)
            if reason is None:
                return format
            reasons.append(f"  {format.name}: {reason}")
    for ending in ("", ".index"):  # TensorFlow's are named by what the names of their files begin with
        git_lfs.check_all(store, path + ending, levels=2)
    what = kinds.described(store, path)
    head = f"{path}: " + (f"{what}; " if what else "") + "of no format that is known here:"
    raise UnsupportedError("\n".join([head, *reasons]))


def is_known(store: Store, path: str) -> bool:
    """Whether a path is a checkpoint of any format, or unreadable, so that it may be one."""
    with store.glance(path):
        return any(accepts(format, store, path) for format in _each())


def has_folder(store: Store, path: str) -> bool:
    """Returns True if a path is a checkpoint, or unreadable, and no folder of files beside which others may lie."""
    with store.glance(path):
        found = {format.name for format in _each() if accepts(format, store, path)}
    return bool(found - _SINGLE_FILES) or (bool(found) and not is_folder(store, path, links=True))


def is_foreign(store: Store, path: str) -> bool:
    """Whether a path is a checkpoint that another library wrote, or unreadable, so that it may be one."""
    with store.glance(path):
        return any(name != "treering" and accepts(get(name), store, path) for name in names())


def accepts(format: Format, store: Store, path: str) -> bool:
    """Whether a path is of a format, or unreadable: then opening it raises."""
    try:
        with reading(path):
            return format.refuses(store, path) is None
    except UnreadableError:
        return True


def is_step(format: Format, store: Store, path: str) -> bool:
    """Whether a directory with a step's name is of a format. Raises `PermissionError` when it cannot be read."""
    if accepts(format, store, path):
        return True
    store.stat(posixpath.join(path, "."))
    return False


def is_damaged_step(store: Store, path: str, file: str, begins: Callable[[bytes], bool]) -> bool:
    """Returns True if what has the name of a step is what is left of one that no format recognizes.

    file: the file of it by which it is recognized: it is empty, or zeros, or `begins` as such a file does.
    """
    with reading(file):
        found = store.stat(file)
        if found is None or not found.is_file:
            return False
        with opened(store, file) as blob:
            data = blob.read_up_to(LOOK)
    return (not data.strip(b"\0") or begins(data)) and not is_known(store, path) and not kinds.is_other(data)


def may_be_file(store: Store, path: str) -> bool:
    """Whether a path is a regular file, or unreadable: then opening it raises."""
    try:
        with reading(path):
            found = store.stat(path)
    except UnreadableError:
        return True
    return found is not None and found.is_file


def _steps(find: "_Find", store: Store, folder: str, listed: Sequence[str]) -> dict[int, str]:
    """The steps that a method of a format finds, without directories that this process may not read."""
    try:
        return find(store, folder, listed)
    except PermissionError:
        open_ones: list[str] = []
    for name in listed:
        try:
            find(store, folder, [name])
            open_ones.append(name)
        except PermissionError as error:
            warn_of_closed(posixpath.join(folder, name), error.strerror)
    return find(store, folder, open_ones)


def check_open(store: Store, folder: str, name: str) -> None:
    """Raises `PermissionError` if a name in a folder may be another library's step and this process may not read it."""
    for format in _foreign(None):
        format.steps(store, folder, [name])
        if find := getattr(format, "damaged_steps", None):
            find(store, folder, [name])


def foreign_steps(
    store: Store, folder: str, ours: Container[str] = (), only: Format | None = None
) -> dict[int, StepPath]:
    """The steps that other libraries have left in a folder; `ours` are names that are known.

    only: the format that counts; by default each but the native one. A step that is too damaged to be recognized counts
    where there is no other of its number.
    """
    found: dict[int, StepPath] = {}
    with reading(folder), store.glance(folder):
        listed = [name for name in store.list(folder) if name not in ours]
        for format in _foreign(only):
            steps = _steps(format.steps, store, folder, listed).items()
            given = None if only is None else format.name
            paths = {step: StepPath(posixpath.join(folder, name), given) for step, name in steps}
            found = {**paths, **found}
        good = {posixpath.basename(one.path) for one in found.values()}
        for step, damaged in damaged_steps(store, folder, [name for name in listed if name not in good], only):
            found.setdefault(step, damaged)
    return found


def damaged_steps(
    store: Store, folder: str, listed: Sequence[str], only: Format | None = None
) -> list[tuple[int, StepPath]]:
    """Returns the steps that are too damaged to be recognized, of the format whose names they have."""
    return [
        (step, StepPath(posixpath.join(folder, name), format.name))
        for format in _foreign(only)
        if (find := getattr(format, "damaged_steps", None))  # which a format of another package need not know
        for step, name in _steps(find, store, folder, listed).items()
    ]


def _foreign(only: Format | None) -> list[Format]:
    return [get(name) for name in names() if name != "treering"] if only is None else [only]
