"""T5X: a folder of zarr arrays beside a state dict in MessagePack, the file ``checkpoint``, which mentions them.

The level ``optimizer`` around everything does not show. Versions 0 (a plain state dict), 2 (bfloat16 stored as
uint16) and 3 are read; 3 is written.
"""

import itertools
import os
import posixpath
import re
from collections.abc import Callable, Collection, Sequence

from ..._core.entries import ArrayEntry
from ..._core.source import Source
from ...stores.read_errors import refusal
from ...stores.store import Store
from .. import is_step, may_be_file
from .._shared.msgpack import MAP, STR, beginning, tokens
from .._zarr.joint_format import ZarrFolders
from .schema import FILE, OF_ORBAX

_STEP = re.compile(r"(?:.*\.)?checkpoint_([0-9]+)", re.DOTALL)
_LEVELS = ("target", "state", "flax_mutables")  # of the state itself


class T5X(ZarrFolders):
    """See `treering.formats.Format`."""

    name = "t5x"
    suffixes = ()
    boxes = ("axis-metadata",)

    def refuses(self, store: Store, path: str) -> str | None:
        try:
            found = store.stat(path)
            if found is None:
                return "there is nothing"
            file = posixpath.join(path, FILE) if found.is_folder else path
            if store.stat(file) is None:
                return f"it is a folder without a file {FILE}"
            if file != path and any(store.stat(posixpath.join(path, name)) for name in OF_ORBAX):
                return "it is a folder of Orbax"
            data = beginning(store, file, 1 << 16)
        except OSError as error:
            return refusal(error, path)
        if b"PLACEHOLDER://" in data:
            return "it names arrays as old releases of Orbax do"
        first = list(itertools.islice(tokens(data), 4))
        kinds = [kind for kind, _ in first]
        if kinds[:2] != [MAP, STR]:
            return "it does not begin like a state dict in MessagePack"
        (_, count), (_, key) = first[:2]
        own_name = os.path.basename(file) == FILE
        inner = first[3][1] if kinds[2:] == [MAP, STR] else None
        if (
            (key == "version" and (count <= 2 or own_name))
            or (key == "optimizer" and inner in _LEVELS and (count == 2 or (count == 1 and own_name)))
            or (key in _LEVELS and own_name)
        ):
            return None
        return f"it begins with {key!r:.100} and not with a version, as T5X's state dicts do"

    def open(self, store: Store, path: str) -> Source:
        from .read import open_state

        there = store.stat(path)
        folder = there is not None and there.is_folder
        name = os.path.basename(path)
        found = _STEP.fullmatch(os.path.basename(os.path.dirname(path)) if name == FILE and not folder else name)
        return open_state(store, path, posixpath.join(path, FILE) if folder else path, int(found[1]) if found else None)

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        steps: dict[int, str] = {}
        for name in names:
            found, path = _STEP.fullmatch(name), posixpath.join(folder, name)
            if found and is_step(self, store, path) and may_be_file(store, posixpath.join(path, FILE)):
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


FORMAT = T5X()
