"""Pointers of git-lfs: a few lines of text that stand in a repository for a large file until it is fetched."""

import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import CorruptError

if TYPE_CHECKING:
    from .posix import Disk

LARGEST = 1024  # bytes of a pointer, by its specification
_BEGIN = b"version https://git-lfs.github.com/spec/"
_MOST_NAMES = 10_000  # in folders that are looked at


def check(path: str, begin: bytes | bytearray) -> None:
    """Raises `CorruptError` when a file that begins with `begin` is a pointer."""
    if begin.startswith(_BEGIN):
        raise CorruptError(f"{path}: found a git-lfs pointer in the place of the file; run `git lfs pull` there")


def check_open(disk: "Disk", fd: int, path: str) -> None:
    """Raises `CorruptError` when an open file is a pointer."""
    if disk.size(fd) <= LARGEST:
        begin = bytearray(len(_BEGIN))
        check(path, begin[: disk.read(fd, memoryview(begin), 0)])


def check_all(disk: "Disk", path: str, *, levels: int = 5) -> None:
    """Raises `CorruptError` when a file, or one in a folder down to `levels`, is a pointer. Passes unreadable ones."""
    for file in _files(disk, path, levels):
        try:
            fd = disk.open(file)
        except OSError:
            continue
        try:
            check_open(disk, fd, file)
        except OSError:
            continue
        finally:
            disk.close(fd)


def _files(disk: "Disk", path: str, levels: int) -> Iterator[str]:
    """The small files at a path and in the folders below it, down to `levels` and up to `_MOST_NAMES` names."""
    left = _MOST_NAMES
    stack = [(path, levels)]
    while stack:
        place, levels = stack.pop()
        try:
            found = os.lstat(place) if place != path else disk.stat(place)
            if found is not None and stat.S_ISREG(found.st_mode) and 0 < found.st_size <= LARGEST:
                yield place
            elif found is not None and stat.S_ISDIR(found.st_mode) and levels:
                names = disk.list(place)[:left]
                left -= len(names)
                stack += [(os.path.join(place, name), levels - 1) for name in sorted(names, reverse=True)]
        except (OSError, ValueError):
            continue
