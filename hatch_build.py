"""Builds the pages of `treering view` and `treering report` before a wheel or an editable installation is made.

The description of a release is README.md, whose links must lead somewhere on PyPI, too.
"""

import os
import re
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class BuildPages(BuildHookInterface[Any]):
    """Hatchling finds this class by its base."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Writes the pages into the package. `pyproject.toml` lists them, because Git ignores them."""
        runpy.run_path(str(Path(self.root, "js", "pages", "build.py")), run_name="__main__")


class AbsoluteLinks(MetadataHookInterface):
    """Hatchling finds this class by its base, too."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Makes relative links absolute, if GITHUB_REPOSITORY names the repository, as in GitHub's workflows."""
        text = Path(self.root, "README.md").read_text("utf-8")
        if repository := os.environ.get("GITHUB_REPOSITORY"):
            version = Path(self.root, "src", "treering", "_version.py").read_text("utf-8").split('"')[1]
            files = f"https://github.com/{repository}/blob/v{version}/"
            pictures = f"https://raw.githubusercontent.com/{repository}/v{version}/"
            relative = re.compile(r"(!?)(\[[^\]]*\]\()(?!https?:|#)")
            text = relative.sub(lambda found: found[0] + (pictures if found[1] else files), text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
