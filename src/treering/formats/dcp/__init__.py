"""Distributed checkpoints of PyTorch (DCP), as `torch.distributed.checkpoint` writes them.

    .metadata
    __0_0.distcp
    __1_0.distcp

Treering reads them without PyTorch, and runs nothing that is in their pickles. A tensor may have been saved in chunks
by any number of processes. Where DCP has recorded the tree, paths are those of the tree; elsewhere each name is a key.
DCP turns the integer keys of dicts into text when it saves, and so they stay text.
"""

import os
import posixpath
import re
from collections.abc import Sequence

from ..._core.source import Source
from ...stores.file_io import opened
from ...stores.read_errors import refusal
from ...stores.store import Store
from .. import is_damaged_step, is_step
from .._shared.format_parts import ReadOnly

_METADATA = ".metadata"
_STEP = re.compile(r"step-(\d{1,18})")
_PICKLE_MAGIC = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class Dcp(ReadOnly):
    """Implements `treering.formats.Format` for distributed checkpoints of PyTorch.

    Values are read as in `Torch`, which also says what is left out. A tensor whose file is missing is lost, and the
    others are readable. With `verify`, the first read of a chunk compares its checksum.
    """

    name = "dcp"
    contents = "checkpoints of PyTorch"

    def refuses(self, store: Store, path: str) -> str | None:
        try:
            found = store.stat(path)
            if found is None or not found.is_folder:
                return "there is nothing" if found is None else "it is a file"
            file = posixpath.join(path, _METADATA)
            there = store.stat(file)
            if there is None or not there.is_file:
                return f"it is a folder without {_METADATA}"
            with opened(store, file) as blob:
                begin = blob.read_up_to(2)
        except OSError as error:
            return refusal(error, path)
        return None if begin in _PICKLE_MAGIC else f"its {_METADATA} does not begin as a pickle does"

    def open(self, store: Store, path: str) -> Source:
        from .read import open_checkpoint

        step = _STEP.fullmatch(os.path.basename(path))
        return open_checkpoint(store, path, posixpath.join(path, _METADATA), int(step[1]) if step else None)

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        # DCP writes the metadata last, so a step that has it was complete.
        found = [step for name in names if (step := _STEP.fullmatch(name))]
        return {int(step[1]): step[0] for step in found if is_step(self, store, posixpath.join(folder, step[0]))}

    def damaged_steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        paths = {step[0]: posixpath.join(folder, step[0]) for name in names if (step := _STEP.fullmatch(name))}
        return {
            int(name.removeprefix("step-")): name
            for name, path in paths.items()
            if is_damaged_step(store, path, posixpath.join(path, _METADATA), lambda data: False)
        }


FORMAT = Dcp()
