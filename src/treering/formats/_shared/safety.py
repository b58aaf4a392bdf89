"""Checks of names in files from others: no path may lead out of its folder, and no two leaves may have one path."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from ...errors import CorruptError, UnsafeError

_MAX_NAME_BYTES = 255  # of a file


def check_inside(folder: str, name: str) -> None:
    """Raises `UnsafeError` for a name that cannot be that of a file in a folder, or that leads out of the folder."""
    if not _is_inside(name):
        raise UnsafeError(f"{folder}: expected the name of something in this folder, found {name!r:.100}")


def problems_of_names(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields each name that cannot be that of a file in a new folder, and the reason, such as a path out of the folder.

    A backslash is refused because it separates folders on Windows.
    """
    found = set(names)
    for name in sorted(found):
        above = next((name[:end] for end, one in enumerate(name) if one == "/" and name[:end] in found), None)
        if not _is_inside(name) or "\\" in name:
            yield name, f"expected the relative path of a file within its folder, in parts of {_MAX_NAME_BYTES} bytes"
        elif above is not None:
            yield name, f"{above!r:.100} is a file, and so no folder"


def _is_inside(name: str) -> bool:
    """Returns True for a relative path that stays in its folder."""
    try:
        parts = [(part, len(part.encode())) for part in name.split("/")]
    except UnicodeEncodeError:
        return False
    return all(part not in ("", ".", "..") and "\0" not in part and size <= _MAX_NAME_BYTES for part, size in parts)


def check_distinct(paths: Sequence[str], where: str) -> None:
    """Raises `CorruptError` for two leaves with one path, and for a leaf that has other leaves below it.

    Only for formats that store a tree. Names of other files may be any, and a template may fit them.
    """
    for path, following in itertools.pairwise(sorted(paths, key=lambda path: path.split("/"))):
        if following == path:
            raise CorruptError(f"{where}: two leaves have one path: {path}")
        if following.startswith(path + "/"):
            raise CorruptError(f"{where}: {path} is a leaf and also has leaves below it, such as {following}")
