"""Checks of names in files from others: no path may lead out of its folder, and no two leaves may have one path."""

import itertools
from collections.abc import Sequence

from ...errors import CorruptError, UnsafeError

_MAX_NAME_BYTES = 255  # of a file


def check_inside(folder: str, name: str) -> None:
    """Raises `UnsafeError` for a name that cannot be that of a file in a folder, or that leads out of the folder."""
    if any(part in ("", ".", "..") or "\0" in part or len(part.encode()) > _MAX_NAME_BYTES for part in name.split("/")):
        raise UnsafeError(f"{folder}: expected the name of something in this folder, found {name!r:.100}")


def check_distinct(paths: Sequence[str], where: str) -> None:
    """Raises `CorruptError` for two leaves with one path, and for a leaf that has other leaves below it."""
    for path, following in itertools.pairwise(sorted(paths, key=lambda path: path.split("/"))):
        if following == path:
            raise CorruptError(f"{where}: two leaves have one path: {path}")
        if following.startswith(path + "/"):
            raise CorruptError(f"{where}: {path} is a leaf and also has leaves below it, such as {following}")
