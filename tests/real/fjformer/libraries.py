"""Imports the checkpoint modules of FJFormer and EasyLM, unmodified, without the imports that these do not need."""

import importlib.machinery
import inspect
import pathlib
import sys
import types
from typing import Any
from unittest.mock import MagicMock


def bare(name: str) -> None:
    """Makes a package without running its `__init__`, which imports everything."""
    found = next(path for path in map(pathlib.Path, sys.path) if [*(path / name).glob("*.py")])
    package = types.ModuleType(name)
    package.__path__ = [str(found / name)]
    package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = package


bare("fjformer")
bare("EasyLM")
for module in ("transformers", "gcsfs", "wandb"):
    sys.modules[module] = MagicMock()

from EasyLM.checkpoint import StreamingCheckpointer  # noqa: E402
from fjformer.checkpoint.streamer import CheckpointManager as Theirs  # noqa: E402


class CheckpointManager(Theirs):
    """FJFormer's class with a `callback`: its release 0.0.91 calls it without checking that there is one."""

    @staticmethod
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        if "callback" in inspect.signature(Theirs.load_checkpoint).parameters:
            kwargs["callback"] = lambda tensor, key: tensor
        return Theirs.load_checkpoint(*args, **kwargs)


__all__ = ["CheckpointManager", "StreamingCheckpointer"]
