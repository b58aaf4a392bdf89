"""Names of files and folders that are being written: ``.name.7f3a9c.tmp`` beside what becomes ``name``."""

import os
import posixpath
import re

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{6}\.tmp", re.DOTALL)


def temporary_beside(path: str) -> str:
    """A temporary name for what will be at a path."""
    directory, name = os.path.split(path)
    return posixpath.join(directory, f".{name}.{os.urandom(3).hex()}.tmp")


def place_of(name: str) -> str | None:
    """The name beside which something with a temporary name is written; None for other names."""
    found = _TEMPORARY.fullmatch(name)
    return found and found[1]
