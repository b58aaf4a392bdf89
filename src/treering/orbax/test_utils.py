"""The namespace `test_utils` of Orbax: the one function that programs and tutorials call."""

import os
import pathlib
import shutil
from typing import Any

from ..errors import UnsupportedError
from ..stores import absolute
from .run import as_path

__all__ = ["erase_and_create_empty"]


def erase_and_create_empty(directory: str | os.PathLike[str]) -> Any:
    """Deletes a directory with everything in it, makes an empty one, and returns its path.

    Raises `UnsupportedError` for a directory in a bucket, and `FileNotFoundError` if its parent is missing.
    """
    path = absolute(directory)
    if "://" in path:
        raise UnsupportedError(f"{path}: expected a directory on a disk; delete the objects in the bucket yourself")
    if os.path.lexists(path):
        shutil.rmtree(path)
    pathlib.Path(path).mkdir()
    return as_path(path)
