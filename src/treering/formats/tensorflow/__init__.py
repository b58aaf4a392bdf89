"""TensorFlow's checkpoints, as T5 and Mesh TensorFlow wrote them: an index and files of data.

    model.ckpt-1000.index
    model.ckpt-1000.data-00000-of-00002
    model.ckpt-1000.data-00001-of-00002

Treering reads them without TensorFlow. Names of variables are paths, and their slashes separate levels. `t5_names`
translates the names of T5 into those of T5X.
"""

import os
import posixpath
import re
from collections.abc import Sequence

from ..._core.source import Source
from ...errors import CorruptError
from ...stores.file_io import opened
from ...stores.read_errors import reading, refusal
from ...stores.store import Store
from .. import accepts, is_damaged_step
from .._shared.format_parts import ReadOnly

_INDEX = ".index"
_LATEST = re.compile(rb'\s*model_checkpoint_path:\s*"([^"\\\0]+)"')
MAX_LATEST_BYTES = 64 << 10  # bytes of the file that names the latest checkpoint
_MAGIC = bytes.fromhex("57fb808b247547db")
_STEP = re.compile(r"(.+(?<!-of)-(\d{1,18}))\.index")  # not "train_ds-000-of-001": those are T5X's iterators over data


class TensorFlow(ReadOnly):
    """Implements `treering.formats.Format` for TensorFlow's checkpoints.

    A checkpoint is named by its prefix, ``model.ckpt-1000``, or by its index. A folder stands for the checkpoint that
    its file `checkpoint` names as the latest; every index in it is a step. Tensors of text become bytes, one leaf for
    each element. With `verify`, the first read of an array reads all of it and compares the checksum.
    """

    name = "tensorflow"
    contents = "checkpoints of TensorFlow"

    def refuses(self, store: Store, path: str) -> str | None:
        try:
            index = index_of(store, path)
            with reading(index), opened(store, index) as blob:
                end = blob.read(max(blob.size - 8, 0), min(blob.size, 8))
            return None if end == _MAGIC else f"{os.path.basename(index)} does not end as a table does"
        except (OSError, CorruptError) as error:
            return refusal(error, path)

    def open(self, store: Store, path: str) -> Source:
        from .read import TensorFlowReader

        try:
            index = index_of(store, path)
        except CorruptError as error:
            raise CorruptError(f"{path}: {error}") from None
        step = _STEP.fullmatch(os.path.basename(index))
        return TensorFlowReader(store, path, index, int(step[2]) if step else None)

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        # TensorFlow writes the index last and deletes it first: if it exists, missing files of data are damage.
        steps = [step for name in names if (step := _STEP.fullmatch(name))]
        return {int(step[2]): step[0] for step in steps if accepts(self, store, posixpath.join(folder, step[0]))}

    def damaged_steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        data = {name.partition(".data-")[0] for name in names if ".data-" in name}
        steps = [step for name in names if (step := _STEP.fullmatch(name)) and step[1] in data]
        paths = {step: posixpath.join(folder, step[0]) for step in steps}
        return {int(step[2]): step[0] for step in steps if is_damaged_step(store, paths[step], paths[step], bool)}


FORMAT = TensorFlow()


def index_of(store: Store, path: str) -> str:
    """Returns the index of the checkpoint that a path stands for. Raises `CorruptError` if there is none."""
    found = store.stat(path)
    if found is not None and found.is_folder:
        latest = posixpath.join(path, "checkpoint")
        there = store.stat(latest)
        if there is None or not there.is_file:
            raise CorruptError("a folder without a file called checkpoint")
        with reading(latest), opened(store, latest) as blob:
            match = _LATEST.match(blob.read_up_to(MAX_LATEST_BYTES))
        if match is None:
            raise CorruptError("its file called checkpoint does not begin with model_checkpoint_path")
        # The recorded path may be outdated, because the folder may have moved: only the name is used.
        index = posixpath.join(path, os.path.basename(os.fsdecode(match[1])) + _INDEX)
    else:
        index = path if path.endswith(_INDEX) else path + _INDEX
    there = store.stat(index)
    if there is None or not there.is_file:
        raise CorruptError(f"there is no {os.path.basename(index)}")
    return index
