"""Paths; the namespace `path` of version 1."""

import os
from typing import Any

from ..own_files import Directory as PathAwaitingCreation
from . import step

__all__ = ["Path", "PathAwaitingCreation", "PathLike", "step"]

PathLike = str | os.PathLike[str]
Path = Any  # of `etils.epath` if that is installed, else of `pathlib`
