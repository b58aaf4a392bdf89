"""The format Levanter: a folder ``step-{n}`` with a zarr array for each leaf and, written last, ``metadata.json``.

An array's folder is the leaf's path: ``model/layers/0/weight``. Old releases write folders of zarr 2. New ones write
one OCDBT database of zarr 3, without the chunks of zeros. No release records the tree: numbers are arrays, and None
and empty containers leave no trace. Treering writes folders of zarr 2, which all releases read.
"""

import datetime
import json
import logging
import posixpath
from collections.abc import Callable, Collection, Sequence

from ..._core.source import Source
from ...errors import CorruptError
from ...stores.file_io import is_file
from ...stores.read_errors import UnreadableError, refusal
from ...stores.store import Store
from .. import DAMAGED_PREFIX_BYTES, is_damaged_step
from .._shared.format_parts import ZarrFolders
from ..orbax.schema import CHECKPOINT, TREE
from .schema import FILE, NAME, own_metadata, read_metadata

_log = logging.getLogger("treering")


class Levanter(ZarrFolders):
    """Implements `treering.formats.JointFormat` for Levanter."""

    name = "levanter"

    def refuses(self, store: Store, path: str) -> str | None:
        try:
            there = store.stat(path)
            if there is None:
                return "there is nothing"
            if not there.is_folder:
                return "it is a file"
            if any(is_file(store, posixpath.join(path, name)) for name in (CHECKPOINT, TREE)):
                return "it was written with Orbax"
            if store.stat(posixpath.join(path, FILE)) is None:
                return f"it is a folder without {FILE}"
            read_metadata(store, path)
        except (CorruptError, OSError) as error:
            return refusal(error, path)
        return None

    def open(self, store: Store, path: str) -> Source:
        from .files import open_checkpoint

        return open_checkpoint(store, path)

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        # Since May 2026, Levanter takes the latest checkpoint by step, then time, then path. Before that, the time came
        # first, which only makes a difference in folders where a user went back to an earlier step.
        found: dict[int, tuple[datetime.datetime, str]] = {}
        for name in () if FILE in names else names:  # otherwise the folder is a checkpoint itself
            path = posixpath.join(folder, name)
            try:
                if self.refuses(store, path) is not None:  # or this process has no permission to read it
                    continue
                about = read_metadata(store, path)
            except UnreadableError as error:  # so its step is unknown
                _log.warning("left out of the steps of %s: %s", folder, error)
                continue
            found[about.step] = max((about.time(), name), found.get(about.step, (about.time(), name)))
        return {step: name for step, (_, name) in found.items()}

    def damaged_steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        steps: dict[int, str] = {}
        for name in () if FILE in names else names:
            step, path = NAME.fullmatch(name), posixpath.join(folder, name)
            if step and is_damaged_step(store, path, posixpath.join(path, FILE), _is_cut_short):
                steps.setdefault(int(step[1]), name)
        return steps

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        return ("step",) if own_metadata(contents) is None else ("step", "metadata")

    def _writer(self) -> Callable[..., int]:
        from .files import write

        return write


def _is_cut_short(data: bytes) -> bool:
    """Returns True if a file is the beginning of a map in JSON. Other programs write such files, too."""
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return data.startswith(b"{") and len(data) < DAMAGED_PREFIX_BYTES  # at LOOK bytes, the file may continue
    return False


FORMAT = Levanter()
