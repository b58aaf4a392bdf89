"""Detects pointers of git-lfs: a few lines of text that stand for a large file until git-lfs has fetched it."""

import posixpath
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import CorruptError, TreeringError

if TYPE_CHECKING:
    from .store import Blob, Store

MAX_POINTER_BYTES = 1024  # bytes; the specification allows no larger pointer
_POINTER_PREFIX = b"version https://git-lfs.github.com/spec/"
_MAX_NAMES = 10_000  # names in folders; further ones are not examined


def check(path: str, begin: bytes | bytearray) -> None:
    """Raises `CorruptError` if the first bytes of a file are those of a pointer."""
    if begin.startswith(_POINTER_PREFIX):
        raise CorruptError(f"{path}: found a git-lfs pointer instead of the file; run `git lfs pull` there")


def check_open(blob: "Blob") -> None:
    """Raises `CorruptError` if an open file is a pointer."""
    if blob.size <= MAX_POINTER_BYTES:
        check(blob.path, blob.read_up_to(len(_POINTER_PREFIX)))


def check_all(store: "Store", path: str, *, levels: int = 5) -> None:
    """Raises `CorruptError` if a file is a pointer, or a folder contains one at most `levels` deep.

    Skips unreadable files.
    """
    for file in _files(store, path, levels):
        try:
            blob = store.open(file)
        except (OSError, TreeringError):
            continue
        try:
            check_open(blob)
        except OSError:
            continue
        finally:
            blob.close()


def _files(store: "Store", path: str, levels: int) -> Iterator[str]:
    """Yields the small files at a path and below it, down to `levels` folders and up to `_MAX_NAMES` names."""
    left = _MAX_NAMES
    stack = [(path, levels)]
    while stack:
        place, levels = stack.pop()
        try:
            if place != path and store.is_link(place):
                continue
            found = store.stat(place)
            if found is not None and found.is_file and 0 < found.nbytes <= MAX_POINTER_BYTES:
                yield place
            elif found is not None and found.is_folder and levels:
                names = store.list(place)[:left]
                left -= len(names)
                stack += [(posixpath.join(place, name), levels - 1) for name in sorted(names, reverse=True)]
        except (OSError, ValueError):
            continue
