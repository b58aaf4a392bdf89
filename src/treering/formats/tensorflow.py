"""Checkpoints of TensorFlow, as T5 and Mesh TensorFlow left them: an index and files of data, read without TensorFlow.

    model.ckpt-1000.index
    model.ckpt-1000.data-00000-of-00002
    model.ckpt-1000.data-00001-of-00002

Names of variables are paths, slashes being levels. `t5_names` has those of T5 as T5X calls them.
"""

import os
import re
import stat
from collections.abc import Collection, Sequence
from typing import Any

from ..errors import CorruptError, UnsupportedError
from ..stores.disk import Disk
from ..stores.on_disk import opened
from ..stores.reading import reading, refusal
from . import Reader, accepts

INDEX = ".index"
_MAGIC = bytes.fromhex("57fb808b247547db")
_STEP = re.compile(r"(.+(?<!-of)-(\d{1,18}))\.index")  # not "train_ds-000-of-001", T5X's iterators over data
_LATEST = re.compile(rb'\s*model_checkpoint_path:\s*"([^"\\\0]+)"')
_TEXT = 64 << 10  # bytes of the file that names the latest checkpoint


class TensorFlow:
    """See `treering.formats.Format`. A checkpoint is named by its prefix, ``model.ckpt-1000``, or by its index.

    A folder is the checkpoint that its file `checkpoint` names as the latest; every index in it is a step. Tensors of
    text become bytes, one leaf for each element. With `verify`, the checksum of an array is tested when a part of it is
    first read, for which all of it has to be read.
    """

    name = "tensorflow"
    suffixes: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()

    def refuses(self, disk: Disk, path: str) -> str | None:
        try:
            index = index_of(disk, path)
            with reading(index), opened(disk, index) as fd:
                end = bytearray(8)
                disk.read(fd, memoryview(end), max(disk.size(fd) - 8, 0))
            return None if end == _MAGIC else f"{os.path.basename(index)} does not end as a table does"
        except (OSError, CorruptError) as error:
            return refusal(error, path)

    def open(self, disk: Disk, path: str) -> Reader:
        from .tensorflow_read import TensorFlowReader

        index = index_of(disk, path)
        step = _STEP.fullmatch(os.path.basename(index))
        return TensorFlowReader(disk, path, index, int(step[2]) if step else None)

    def steps(self, disk: Disk, folder: str, names: Sequence[str]) -> dict[int, str]:
        # TensorFlow writes the index last and deletes it first: where it is, files of data that are not are damage.
        steps = [step for name in names if (step := _STEP.fullmatch(name))]
        return {int(step[2]): step[0] for step in steps if accepts(self, disk, os.path.join(folder, step[0]))}

    def keeps(self, path: str, contents: Reader) -> Collection[str]:
        return ()

    def write(self, disk: Disk, path: str, contents: Reader, *, overwrite: bool, **options: Any) -> int:
        raise UnsupportedError(f"{path}: checkpoints of TensorFlow are only read; choose another format")


FORMAT = TensorFlow()


def index_of(disk: Disk, path: str) -> str:
    """The index of the checkpoint that a path means. Raises `CorruptError` when it means none."""
    found = disk.stat(path)
    if found is not None and stat.S_ISDIR(found.st_mode):
        latest = os.path.join(path, "checkpoint")
        there = disk.stat(latest)
        if there is None or not stat.S_ISREG(there.st_mode):
            raise CorruptError("a folder without a file called checkpoint")
        text = bytearray(min(there.st_size, _TEXT))
        with reading(latest), opened(disk, latest) as fd:
            match = _LATEST.match(text[: disk.read(fd, memoryview(text), 0)])
        if match is None:
            raise CorruptError("its file called checkpoint does not begin with model_checkpoint_path")
        # The folder may have moved since: what counts is the name.
        index = os.path.join(path, os.path.basename(os.fsdecode(bytes(match[1]))) + INDEX)
    else:
        index = path if path.endswith(INDEX) else path + INDEX
    there = disk.stat(index)
    if there is None or not stat.S_ISREG(there.st_mode):
        raise CorruptError(f"there is no {os.path.basename(index)}")
    return index
