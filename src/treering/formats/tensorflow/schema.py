"""Names of TensorFlow's files."""

import os
import re
import stat

from ...errors import CorruptError
from ...stores.posix import Disk
from ...stores.read_errors import reading
from ...stores.whole_files import opened

NAME = "tensorflow"
INDEX = ".index"
_LATEST = re.compile(rb'\s*model_checkpoint_path:\s*"([^"\\\0]+)"')
MAX_LATEST_BYTES = 64 << 10  # bytes of the file that names the latest checkpoint


def index_of(disk: Disk, path: str) -> str:
    """The index of the checkpoint that a path means. Raises `CorruptError` when it means none."""
    found = disk.stat(path)
    if found is not None and stat.S_ISDIR(found.st_mode):
        latest = os.path.join(path, "checkpoint")
        there = disk.stat(latest)
        if there is None or not stat.S_ISREG(there.st_mode):
            raise CorruptError("a folder without a file called checkpoint")
        text = bytearray(min(there.st_size, MAX_LATEST_BYTES))
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
