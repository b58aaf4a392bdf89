"""Builds the pages of `treering view` and `treering report` before a wheel or an editable installation is made."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BuildPages(BuildHookInterface[Any]):
    """Hatchling finds this class by its base."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Writes the pages into the package. `pyproject.toml` lists them, because Git ignores them."""
        runpy.run_path(str(Path(self.root, "js", "pages", "build.py")), run_name="__main__")
