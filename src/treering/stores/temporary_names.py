"""Makes and recognizes temporary names.

``.name.7f3a9c.tmp`` is being written and becomes ``name``. ``name.7f3a9c.tmp`` was written to read a server's clock.
"""

import os
import posixpath
import re

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{6}\.tmp", re.DOTALL)
_CLOCK = re.compile(r"(.+)\.[0-9a-f]{6}\.tmp", re.DOTALL)


def temporary_sibling(path: str) -> str:
    """Returns a temporary name for a file or folder that will be at a path."""
    directory, name = os.path.split(path)
    return posixpath.join(directory, f".{name}.{os.urandom(3).hex()}.tmp")


def final_name(name: str) -> str | None:
    """Returns the final name that belongs to a temporary name; None for other names."""
    found = _TEMPORARY.fullmatch(name)
    return found and found[1]


def clock_probe_sibling(path: str) -> str:
    """Returns a name for an object next to a path, which reads the server's clock.

    The path may be such a name itself.
    """
    found = _CLOCK.fullmatch(path)
    return f"{found[1] if found else path}.{os.urandom(3).hex()}.tmp"


def clock_probe_target(name: str) -> str | None:
    """Returns the name next to which the server's clock was read; None for other names."""
    found = _CLOCK.fullmatch(name)
    return found and found[1]
