"""Names of TensorFlow's files, and finding the index of a path."""

import os
import posixpath
import re

from ...errors import CorruptError
from ...stores.file_io import opened
from ...stores.read_errors import reading
from ...stores.store import Store

NAME = "tensorflow"
INDEX = ".index"
_LATEST = re.compile(rb'\s*model_checkpoint_path:\s*"([^"\\\0]+)"')
MAX_LATEST_BYTES = 64 << 10  # bytes of the file that names the latest checkpoint


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
        index = posixpath.join(path, os.path.basename(os.fsdecode(match[1])) + INDEX)
    else:
        index = path if path.endswith(INDEX) else path + INDEX
    there = store.stat(index)
    if there is None or not there.is_file:
        raise CorruptError(f"there is no {os.path.basename(index)}")
    return index
