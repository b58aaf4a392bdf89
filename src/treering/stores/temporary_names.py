"""Names of what is there for a while.

``.name.7f3a9c.tmp`` is being written and becomes ``name``; ``name.7f3a9c.tmp`` was put there to read a server's clock.
"""

import os
import posixpath
import re

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{6}\.tmp", re.DOTALL)
_CLOCK = re.compile(r"(.+)\.[0-9a-f]{6}\.tmp", re.DOTALL)


def temporary_beside(path: str) -> str:
    """A temporary name for what will be at a path."""
    directory, name = os.path.split(path)
    return posixpath.join(directory, f".{name}.{os.urandom(3).hex()}.tmp")


def place_of(name: str) -> str | None:
    """The name beside which something with a temporary name is written; None for other names."""
    found = _TEMPORARY.fullmatch(name)
    return found and found[1]


def clock_beside(path: str) -> str:
    """A name for an object that is put beside what is at a path, which may be temporary itself."""
    beside = _CLOCK.fullmatch(path)
    return f"{beside[1] if beside else path}.{os.urandom(3).hex()}.tmp"


def clock_of(name: str) -> str | None:
    """The name beside which a server was asked for the time; None for other names."""
    found = _CLOCK.fullmatch(name)
    return found and found[1]
