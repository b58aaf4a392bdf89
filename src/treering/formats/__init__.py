"""The checkpoint formats, one module each, and their registry.

A format knows files and their contents. It never knows about templates, meshes or Checkpointers. It opens a checkpoint
as a `Source`, which has the leaves by path and reads their contents on request. It writes a checkpoint from a `Source`.
"""

import difflib
import importlib
import logging
import posixpath
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from .._core.boxes import Box
from .._core.entries import ArrayEntry, Entry, ValueEntry
from .._core.skeleton import Skeleton
from .._core.source import Problem, Share, Source
from .._core.tracebacks import hide_internal_frames
from ..errors import MismatchError, UnsupportedError
from ..stores import file_io
from ..stores.file_io import is_folder, opened
from ..stores.nfs import warn_unlistable
from ..stores.read_errors import UnreadableError, reading
from ..stores.store import Stat, Store
from ._shared import unknown_files

if TYPE_CHECKING:
    from .._core.calls import Call
    from .._core.layouts import Layout

_log = logging.getLogger("treering")

# The names that formats in other packages need.
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

    A format may also have a method `damaged_steps(store, folder, names)`. It returns the names, by step number, of
    steps that are probably of this format but too damaged for `refuses` to recognize them.
    """

    @property
    def name(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """File name endings that choose this format for a destination without `format=`: ``(".eqx",)``."""
        ...

    @property
    def boxes(self) -> tuple[str, ...]:
        """Kinds of boxes around leaves that the library adds as path levels: "variable" (NNX), "axis-metadata" (Linen).

        These boxes are wrapper objects, not the index bounds of pieces.
        """
        ...

    def refuses(self, store: Store, path: str) -> str | None:
        """Returns the reason why a path is not of this format, or None if it is. Reads at most a header."""
        ...

    def open(self, store: Store, path: str) -> Source:
        """Opens a checkpoint of this format. Raises `CorruptError` and `UnsupportedError`."""
        ...

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        """Returns the names of the complete checkpoints of a run, by step number. Considers only `names`."""
        ...

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        """Returns those of ``step``, ``metrics`` and ``metadata`` that this format stores, for these contents and path.

        A save raises before it writes anything if the caller has given one that is not stored. A copy of a checkpoint
        leaves such a value out and logs that.
        """
        ...

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        """Writes a checkpoint in one step and returns its size in bytes.

        Raises `UnsupportedError`, before anything is written, for leaves that the format cannot store, and names each.
        Raises it too for a checkpoint that would not open as this format.
        """
        ...


@runtime_checkable
class JointFormat(Format, Protocol):
    """A format whose checkpoints the processes of a job can write together, each its part of the arrays."""

    def splits(self, entry: ArrayEntry) -> bool:
        """Returns True if several processes can each write some parts of an array."""
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
        """Writes a checkpoint together with the other processes of a call. Returns its size in bytes; see `write`.

        layouts: for each array that is split over processes, by path, the processes that have its parts. Every process
            has all of each other array. `contents` cannot read parts that this process does not have.
        """
        ...


_FindSteps = Callable[[Store, str, Sequence[str]], dict[int, str]]


class StepPath(NamedTuple):
    """The path of a step. `format` is set if the caller has named it, or if the step is too damaged to recognize it."""

    path: str
    format: str | None = None


# In the order in which `detect` tries them. Each module, imported when first needed, has an object `FORMAT`; after a
# colon stands another name. They recognize files without NumPy; what they need to read them is imported then.
_MODULES = {
    "treering": "treering",
    "t5x": "t5x",
    "fjformer": "fjformer",
    "slime": "weight_streams:SLIME",
    "skyrl": "weight_streams:SKYRL",
    # Before the formats below: of a folder with one model in several formats, most libraries read this one.
    "safetensors": "safetensors",
    "flax": "flax",
    "equinox": "equinox",
    "npz": "npz",
    "torch": "torch",
    "keras": "keras",
    "tensorflow": "tensorflow",
    "orbax": "orbax",
    "dcp": "dcp",
    "levanter": "levanter",
}
_registered: dict[str, Format] = {}
_is_searched = False  # True once the entry points of installed packages have been loaded
DAMAGED_PREFIX_BYTES = 1 << 16  # bytes that are read of a file that may be a damaged step
_SINGLE_FILES = {"fjformer", "safetensors", "flax", "equinox", "tensorflow"}  # their folders may have other files too
_ALIASES = {"easylm": "fjformer"}
# Endings that only these formats use. A folder of the native format with such a name would be taken for one of them.
_ONLY_READ = {".npz": "npz", ".pt": "torch", ".pth": "torch", ".h5": "keras", ".keras": "keras"}
# Files of these endings are never checkpoints. A directory of that name would surprise its reader.
_OTHER_FILES = (".npy", ".pkl", ".pickle", ".tar", ".tgz", ".gz", ".zip", ".zst", ".json", ".csv", ".gguf", ".onnx")
# Formats that are never detected, because files of another format may look like theirs.
_UNDETECTED = {"t5x-without-zeros": "t5x:WITHOUT_ZEROS", "zarr": "zarr"}


def __getattr__(name: str) -> Any:
    if name == "t5_names":  # Imported when first needed, like the formats.
        return importlib.import_module(".t5_names", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@hide_internal_frames
def register(format: Format) -> None:
    """Adds a format of another package. It replaces a format of the same name.

    Installed packages need no call: they can declare a format as an entry point of the group ``treering.formats``.
    """
    _registered[format.name] = format


def _register_installed() -> None:
    """Adds the formats that installed packages declare as entry points, once per process.

    An entry point with the name of a known format is ignored. One that fails to load is logged.
    """
    global _is_searched
    if _is_searched:
        return
    import importlib.metadata  # A large module that opening a checkpoint seldom needs.

    _is_searched = True  # Set first: a package may call `names` while it is imported, which would recurse.
    for point in importlib.metadata.entry_points(group="treering.formats"):
        if point.name in _MODULES or point.name in _UNDETECTED or point.name in _registered:
            continue  # A format that the program itself has registered has precedence.
        try:
            format = point.load()
            # It would replace the shipped format, but only once the entry points have been loaded. Then the format of
            # a file would depend on earlier calls.
            if format.name in _MODULES or format.name in _UNDETECTED:
                raise MismatchError(f"Treering itself has a format with the name {format.name!r}")
            register(format)
        except Exception as error:  # A fault in another package must not stop work with other formats.
            _log.warning("the format %r of %s is not available; loading it failed: %r", point.name, point.value, error)


@hide_internal_frames
def names() -> list[str]:
    """Returns the names of all formats: the shipped ones, the registered ones, and those of installed packages."""
    _register_installed()
    return list(dict.fromkeys([*_MODULES, *_registered]))


def _all_formats() -> Iterator[Format]:
    """Yields all formats in the order in which `detect` tries them. Loads those of installed packages last."""
    for name in _MODULES:
        yield get(name)
    for name in names()[len(_MODULES) :]:
        yield get(name)


@hide_internal_frames
def get(name: str) -> Format:
    """Returns a format by name. Raises a `MismatchError` that lists the known names."""
    name = _ALIASES.get(name, name)
    if name not in _registered and (place := _UNDETECTED.get(name) or _MODULES.get(name)):
        module, _, attribute = place.partition(":")
        found = getattr(importlib.import_module(f".{module}", __name__), attribute or "FORMAT")
        if name in _UNDETECTED:
            return found
        _registered[name] = found
    if name not in _registered:
        _register_installed()
    if name not in _registered:
        raise MismatchError(_unknown(name, [*names(), *_UNDETECTED]))
    return _registered[name]


def _unknown(name: object, known: Sequence[str]) -> str:
    """Returns the message about a name that is none of the known ones."""
    similar = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.7) if isinstance(name, str) else []
    meant = f"{similar[0]!r}, or another" if similar else ""
    return f"format={name!r}: expected {meant or 'one'} of {', '.join(map(repr, known))}"


def for_path(path: str, name: str | None) -> Format:
    """Returns the format to write a path in: the named one, else the one of its suffix, else the native one.

    Raises `UnsupportedError` for a format that is only read and for a misspelt suffix, and a `MismatchError` that lists
    the formats to write.
    """
    if name is not None:
        from ._shared.format_parts import ReadOnly

        try:
            named = get(name)
        except MismatchError:
            written = [one for one in [*names(), *_UNDETECTED] if not isinstance(get(one), ReadOnly)]
            raise MismatchError(_unknown(name, written)) from None
        if isinstance(named, ReadOnly):
            raise named.only_read(path)
        return named
    all_formats = [_registered.get(n) or get(n) for n in names()]
    suffixes: dict[str, Format] = {}
    for format in all_formats:
        for suffix in format.suffixes:
            suffixes.setdefault(suffix, format)  # No format of a package takes the suffix of another.
    if found := next((format for suffix, format in suffixes.items() if path.endswith(suffix)), None):
        return found
    if ending := next((ending for ending in _ONLY_READ if path.endswith(ending)), None):
        raise UnsupportedError(
            f"{path}: expected a name for a format that can be written, found the ending {ending} of the format "
            f"{_ONLY_READ[ending]!r}, which is only read; choose another ending, such as .safetensors, or name the "
            "format, such as 'treering'"
        )
    ending = posixpath.splitext(path)[1]
    if ending.lower() in _OTHER_FILES:
        raise UnsupportedError(
            f"{path}: expected a name for a format that can be written, found the ending {ending}, of a file that none "
            "of them is; choose another ending, such as .safetensors, or name the format, such as 'treering', which "
            "writes a directory"
        )
    for similar in difflib.get_close_matches(ending.lower(), suffixes, n=1, cutoff=0.85):
        if abs(len(ending) - len(similar)) <= 2:
            raise UnsupportedError(
                f"{path}: expected the ending of a format, or another name, found {ending}; the closest ending is "
                f"{similar}; or name the format, such as 'treering'"
            )
    return get("treering")


def detect(store: Store, path: str) -> Format:
    """Returns the format of the checkpoint at a path.

    Raises `UnsupportedError` if no format accepts the path. It says what the path is, if known, and why each format
    refuses it. Raises `CorruptError` for git-lfs pointers and unreadable files, which may be of any format.
    """
    reasons: list[tuple[bool, str]] = []
    with reading(path), store.glance(path):  # The formats ask for the same files, so the store caches its answers.
        for format in _all_formats():
            if (reason := format.refuses(store, path)) is None:
                return format
            endings = (*format.suffixes, *(ending for ending, name in _ONLY_READ.items() if name == format.name))
            if reason not in ("not a file", "it is a file"):
                reasons.append((not path.endswith(endings), f"  {format.name}: {reason}"))
    for ending in ("", ".index"):  # A path of TensorFlow's format is only a prefix of file names.
        file_io.check_all_fetched(store, path + ending, levels=2)
    what = unknown_files.describe(store, path, lambda inner: is_known(store, inner))
    head = f"{path}: " + (f"{what}; " if what else "") + "of no format that is known here:"
    likely_first = sorted(reasons, key=lambda one: one[0])  # that of the ending
    raise UnsupportedError("\n".join([head, *(text for _, text in likely_first)]))


def is_known(store: Store, path: str) -> bool:
    """Returns True if a path is a checkpoint of any format, or unreadable and so perhaps one."""
    with store.glance(path):
        return any(accepts(format, store, path) for format in _all_formats())


def has_folder(store: Store, path: str) -> bool:
    """Returns True if a path is a checkpoint, or unreadable, and everything at the path belongs to it.

    Returns False for a folder with a checkpoint of a single-file format, because it may hold unrelated files too.
    """
    with store.glance(path):
        found = (format.name for format in _all_formats() if accepts(format, store, path))
        single = False
        for name in found:
            if name not in _SINGLE_FILES:
                return True
            single = True
    return single and not is_folder(store, path, links=True)


def has_single_file(store: Store, path: str) -> bool:
    """Returns True if a path is a checkpoint of a single-file format, or a folder that would open as one."""
    with store.glance(path):
        return any(accepts(get(name), store, path) for name in _SINGLE_FILES)


def is_foreign(store: Store, path: str) -> bool:
    """Returns True if a path is a checkpoint that another library wrote, or unreadable and so perhaps one."""
    with store.glance(path):
        return any(name != "treering" and accepts(get(name), store, path) for name in names())


def accepts(format: Format, store: Store, path: str) -> bool:
    """Returns True if a path is of a format, or unreadable. Opening an unreadable path raises the error."""
    try:
        with reading(path):
            return format.refuses(store, path) is None
    except UnreadableError:
        return True


def is_step(format: Format, store: Store, path: str) -> bool:
    """Returns True if a directory with the name of a step is of a format.

    Raises `PermissionError` if this process may not read the directory.
    """
    if accepts(format, store, path):
        return True
    store.stat(posixpath.join(path, "."))
    return False


def is_damaged_step(store: Store, path: str, file: str, begins: Callable[[bytes], bool]) -> bool:
    """Returns True if a path with the name of a step is a damaged step that no format recognizes.

    file: the file that identifies the format. In a damaged step it is empty, holds only zeros, or begins as such a file
        does, which `begins` decides.
    """
    with reading(file):
        found = store.stat(file)
        if found is None or not found.is_file:
            return False
        with opened(store, file) as blob:
            data = blob.read_up_to(DAMAGED_PREFIX_BYTES)
    return (not data.strip(b"\0") or begins(data)) and not is_known(store, path) and not unknown_files.is_other(data)


def may_be_file(store: Store, path: str) -> bool:
    """Returns True if a path is a regular file, or unreadable. Opening an unreadable path raises the error."""
    try:
        with reading(path):
            found = store.stat(path)
    except UnreadableError:
        return True
    return found is not None and found.is_file


def _steps(find: "_FindSteps", store: Store, folder: str, listed: Sequence[str]) -> dict[int, str]:
    """Returns the steps that a method of a format finds. Skips directories that this process may not read."""
    try:
        return find(store, folder, listed)
    except PermissionError:
        open_ones: list[str] = []
    for name in listed:
        try:
            find(store, folder, [name])
            open_ones.append(name)
        except PermissionError as error:
            warn_unlistable(posixpath.join(folder, name), error.strerror)
    return find(store, folder, open_ones)


def check_open(store: Store, folder: str, name: str) -> None:
    """Raises `PermissionError` if a name in a folder may be a foreign step that this process may not read."""
    for format in _foreign_formats(None):
        format.steps(store, folder, [name])
        if find := getattr(format, "damaged_steps", None):
            find(store, folder, [name])


def foreign_steps(
    store: Store,
    folder: str,
    ours: Container[str] = (),
    only: Format | None = None,
    prefix: str | None = None,
    known: Mapping[int, StepPath] | None = None,
) -> dict[int, StepPath]:
    """Returns the steps in a folder that other libraries have written, by step number.

    A damaged step is included only if no undamaged one has its number.

    ours: names in the folder that are not considered.
    only: the format to look for; by default all except the native one.
    prefix: the text before the numbers in the names that are considered; by default any.
    known: such steps that the caller has found before. Those that are still in the folder are not looked at.
    """
    with reading(folder), store.glance(folder):
        listed = [name for name in store.list(folder) if name not in ours]
        if prefix is not None:
            listed = [name for name in listed if name.rstrip("0123456789") == prefix]
        names = {posixpath.basename(one.path): (step, one) for step, one in (known or {}).items()}
        found = dict(names[name] for name in listed if name in names)
        listed = [name for name in listed if name not in names]
        if not listed:  # An empty run, or one of Treering only: most calls. A dozen formats need not be asked.
            return found
        store = store if only else _LookedOnce(store, folder)  # type: ignore[assignment]
        for format in _foreign_formats(only):
            steps = _steps(format.steps, store, folder, listed).items()
            given = None if only is None else format.name
            paths = {step: StepPath(posixpath.join(folder, name), given) for step, name in steps}
            found = {**paths, **found}
        good = {posixpath.basename(one.path) for one in found.values()}
        for step, damaged in damaged_steps(store, folder, [name for name in listed if name not in good], only):
            found.setdefault(step, damaged)
    return found


class _LookedOnce:
    """A store that lists each folder once, although each format looks for its own files there.

    It answers from memory, so it serves one operation.
    """

    def __init__(self, store: Store, folder: str):
        self._store = store
        self._stats: dict[str, Stat | None] = {}
        # The names in a folder; None if it cannot be listed.
        self._names: dict[str, Sequence[str] | None] = {folder: store.list(folder)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def stat(self, path: str) -> Stat | None:
        if path not in self._stats:
            folder, name = posixpath.split(path)
            is_known = folder in self._names or folder in self._stats
            names = self._names_in(folder) if is_known and name not in ("", ".", "..") else None
            self._stats[path] = self._store.stat(path) if names is None or name in names else None
        return self._stats[path]

    def list(self, path: str) -> Sequence[str]:
        if path not in self._names:
            self.stat(path)
        names = self._names_in(path)
        return self._store.list(path) if names is None else names

    def _names_in(self, folder: str) -> Sequence[str] | None:
        if folder not in self._names:
            found = self._stats[folder]
            try:
                self._names[folder] = self._store.list(folder) if found and found.is_folder else ()
            except OSError:  # It may still be allowed to look names up.
                self._names[folder] = None
        return self._names[folder]


def damaged_steps(
    store: Store, folder: str, listed: Sequence[str], only: Format | None = None
) -> list[tuple[int, StepPath]]:
    """Returns the steps that are too damaged to be recognized, each with the format that their names suggest."""
    return [
        (step, StepPath(posixpath.join(folder, name), format.name))
        for format in _foreign_formats(only)
        if (find := getattr(format, "damaged_steps", None))  # The method is optional for formats of other packages.
        for step, name in _steps(find, store, folder, listed).items()
    ]


def _foreign_formats(only: Format | None) -> list[Format]:
    return [get(name) for name in names() if name != "treering"] if only is None else [only]
