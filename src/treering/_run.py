"""A run on the disk: a directory of checkpoints, one per step."""

import os
import re

from . import stores
from ._paths import absolute
from .stores.local import MANIFEST

_NAME = re.compile(r"(.*?)(\d+)")
DIGITS = 8  # of a step in a name; fewer are padded, more are written out


def step_name(prefix: str, step: int) -> str:
    """The directory of a step: ``step-00001000``."""
    return f"{prefix}{step:0{DIGITS}}"


def parse(name: str, prefix: str | None) -> int | None:
    """The step that a directory's name says, None when it is not of this prefix (None: any)."""
    match = _NAME.fullmatch(name)
    return int(match[2]) if match and (prefix is None or match[1] == prefix) else None


def committed(run: str, prefix: str | None = None) -> dict[int, str]:
    """The committed steps of a run, ascending, and the names of their directories.

    A directory counts when its name is `prefix` (None: anything) and digits, and it holds a manifest.
    """
    found: dict[int, str] = {}
    for name in stores.DISK.list(run):
        step = parse(name, prefix)
        if step is not None and stores.DISK.stat(os.path.join(run, name, MANIFEST)):
            found.setdefault(step, name)
    return dict(sorted(found.items()))


def steps(run: str | os.PathLike[str]) -> list[int]:
    """The steps of a run that are committed, ascending; none when there is no such run.

    >>> tr.steps("runs/gpt")
    [1000, 2000]
    """
    return list(committed(absolute(run)))
