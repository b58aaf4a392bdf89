"""Imports the checkpoint modules of T5X, unmodified, without the imports they do not need: Amos, SeqIO, models."""

import importlib.machinery
import pathlib
import sys
import types
from typing import Any
from unittest.mock import MagicMock

from flax import traverse_util


def flatten(tree: Any) -> dict[str, Any]:
    return traverse_util.flatten_dict(tree, sep="/")


found = next(path for path in map(pathlib.Path, sys.path) if (path / "t5x" / "checkpoints.py").exists())
package = types.ModuleType("t5x")
package.__path__ = [str(found / "t5x")]
package.__spec__ = importlib.machinery.ModuleSpec("t5x", None, is_package=True)
sys.modules["t5x"] = package
utils: Any = types.ModuleType("t5x.utils")  # Adafactor only uses this function of it
utils.flatten_dict_string_keys = flatten
sys.modules["t5x.utils"] = utils
for name in ("jestimator", "jestimator.amos", "jestimator.amos_helper"):
    sys.modules[name] = MagicMock()

from t5x import adafactor, checkpoints, optimizers, partitioning, train_state  # noqa: E402

__all__ = ["adafactor", "checkpoints", "optimizers", "partitioning", "train_state"]
