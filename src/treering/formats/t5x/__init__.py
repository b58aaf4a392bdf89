"""The format T5X: zarr arrays in a folder, and the file ``checkpoint``, a state dict in MessagePack that names them.

Treering leaves out the level ``optimizer`` around the tree. It reads versions 0 (a plain state dict), 2 (bfloat16
stored as uint16) and 3; it writes version 3.

TensorStore before 0.1.17 stored no chunks of zeros, and nothing in most files tells its release. A missing chunk that
may be zeros raises `UnsupportedError`; the format ``t5x-without-zeros`` reads it as zeros.
"""

import itertools
import os
import posixpath
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..._core.entries import ArrayEntry
from ..._core.source import Source
from ...errors import CorruptError
from ...stores.file_io import is_file, opened
from ...stores.read_errors import reading, refusal
from ...stores.store import Store
from .. import is_damaged_step, is_step, may_be_file
from .._shared.format_parts import ZarrFolders
from .._shared.msgpack import MAP, NEVER, STR, VALUE, Scanner, beginning, begins_with, ending, tokens
from .schema import FILE, ORBAX_FILES, PLACEHOLDER, VERSIONS

_STEP = re.compile(r"(?:.*\.)?checkpoint_([0-9]+)", re.DOTALL)
_VERSION = re.compile(rb"\xa7version([\0-\x7f])\Z")
_LEVELS = ("target", "state", "flax_mutables")  # levels of the state itself


class T5X(ZarrFolders):
    """Implements `treering.formats.JointFormat` for T5X."""

    name = "t5x"
    boxes = ("axis-metadata",)
    without_zeros = False

    def refuses(self, store: Store, path: str) -> str | None:
        try:
            found = store.stat(path)
            if found is None:
                return "there is nothing"
            file = posixpath.join(path, FILE) if found.is_folder else path
            if store.stat(file) is None:
                return f"it is a folder without a file {FILE}"
            if file != path and any(is_file(store, posixpath.join(path, name)) for name in ORBAX_FILES):
                return "it is a folder of Orbax"
            data = beginning(store, file, 1 << 16)
            first = [*itertools.islice(tokens(data), 6), *[(NEVER, None)] * 6]
            version = _version_behind(store, file) if first[:2] == [(MAP, 2), (STR, "optimizer")] else None
        except OSError as error:
            return refusal(error, path)
        if PLACEHOLDER.encode() in data:
            return "it names arrays as old releases of Orbax do"
        if [kind for kind, _ in first[:2]] != [MAP, STR]:
            return "it does not begin like a state dict in MessagePack"
        if _is_state(first, version, own_name=os.path.basename(file) == FILE):
            return None
        return f"it begins with {first[1][1]!r:.100}, without the version and the optimizer of a T5X state dict"

    def open(self, store: Store, path: str) -> Source:
        from .read import open_state

        there = store.stat(path)
        folder = there is not None and there.is_folder
        name = os.path.basename(path)
        found = _STEP.fullmatch(os.path.basename(os.path.dirname(path)) if name == FILE and not folder else name)
        file, step = posixpath.join(path, FILE) if folder else path, int(found[1]) if found else None
        return open_state(store, path, file, step, without_zeros=self.without_zeros)

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        steps: dict[int, str] = {}
        for name in names:
            found, path = _STEP.fullmatch(name), posixpath.join(folder, name)
            if found and is_step(self, store, path) and may_be_file(store, posixpath.join(path, FILE)):
                steps.setdefault(int(found[1]), name)
        return steps

    def damaged_steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        steps: dict[int, str] = {}
        for name in names:
            found, path = _STEP.fullmatch(name), posixpath.join(folder, name)
            if not found or any(is_file(store, posixpath.join(path, one)) for one in ORBAX_FILES):
                continue
            if is_damaged_step(store, path, posixpath.join(path, FILE), begins_with(MAP)):
                steps.setdefault(int(found[1]), name)
        return steps

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        found = _STEP.fullmatch(os.path.basename(path))
        return ("step",) if found and int(found[1]) == contents.step else ()

    def splits(self, entry: ArrayEntry) -> bool:
        from .write import splits

        return splits(entry)

    def _writer(self) -> Callable[..., int]:
        from .write import write

        return write


def _version_behind(store: Store, file: str) -> Any:
    """Returns the version that follows the optimizer in a map; None if there is none."""
    if not _VERSION.search(ending(store, file, 16)):
        return None
    try:
        with reading(file), opened(store, file) as blob:
            # Only a key of the outer map, not of one within it
            return Scanner(blob).value_of_range(0, blob.size).get("version")
    except CorruptError:
        return None


def _is_state(first: Sequence[tuple[int, Any]], version: Any, *, own_name: bool) -> bool:
    """Returns True if a map with these first tokens, and this version at its end, is a T5X state dict.

    All of its keys must be T5X's, because users also have keys `version` and `optimizer`. A file with T5X's name may
    also have an unknown version, or none.
    """
    (_, count), (_, key), *rest = first
    is_empty = own_name and rest[0][1] == 0  # an unknown version may be an empty list or map
    if key == "version" and (rest[0][0] in (VALUE, STR) or is_empty) and rest[1][0] == STR:
        own_keys = rest[1][1] == "optimizer" or rest[1][1] in _LEVELS
        return own_keys if own_name else count == 2 and _is_version(rest[0][1]) and _is_optimizer(rest[1:])
    if key == "optimizer" and _is_optimizer(first[1:]):
        return (count == 1 and own_name) or (type(version) is int if own_name else _is_version(version))
    return key in _LEVELS and own_name


def _is_version(value: Any) -> bool:
    return type(value) is int and value in VERSIONS


def _is_optimizer(tokens: Sequence[tuple[int, Any]]) -> bool:
    """Returns True if a key and its value begin like the state itself."""
    (_, key), (kind, _), (_, inner) = tokens[:3]
    return key == "optimizer" and kind == MAP and inner in _LEVELS


class T5XWithoutZeros(T5X):
    """Reads missing chunks as zeros, because the user has said that TensorStore before 0.1.17 wrote the checkpoint."""

    name = "t5x-without-zeros"
    without_zeros = True


FORMAT = T5X()
WITHOUT_ZEROS = T5XWithoutZeros()
