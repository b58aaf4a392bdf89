"""Imports the checkpoint modules of Levanter, unmodified, without the imports that these do not need."""

import importlib.machinery
import pathlib
import sys
import types

found = next(path for path in map(pathlib.Path, sys.path) if (path / "levanter" / "checkpoint.py").exists())
package = types.ModuleType("levanter")
package.__path__ = [str(found / "levanter")]
package.__spec__ = importlib.machinery.ModuleSpec("levanter", None, is_package=True)
sys.modules["levanter"] = package

from levanter import checkpoint, tensorstore_serialization  # noqa: E402

__all__ = ["checkpoint", "tensorstore_serialization"]
