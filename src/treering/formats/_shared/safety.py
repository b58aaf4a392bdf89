"""What no file may claim: paths that lead out of its folder, and two leaves of one path."""

import itertools
from collections.abc import Sequence

from ...errors import CorruptError, UnsafeError

_LONGEST = 255  # bytes of a file's name


def check_inside(folder: str, name: str) -> None:
    """Raises `UnsafeError` for a name that is no name in a folder, or leads out of it."""
    if any(part in ("", ".", "..") or "\0" in part or len(part.encode()) > _LONGEST for part in name.split("/")):
        raise UnsafeError(f"{folder}: expected the name of something in this folder, found {name!r:.100}")


def check_apart(paths: Sequence[str], where: str) -> None:
    """Raises `CorruptError` for two leaves of one path, and for one that has leaves below it."""
    for path, following in itertools.pairwise(sorted(paths, key=lambda path: path.split("/"))):
        if following == path:
            raise CorruptError(f"{where}: two leaves have one path: {path}")
        if following.startswith(path + "/"):
            raise CorruptError(f"{where}: {path} is a leaf and also has leaves below it, such as {following}")
