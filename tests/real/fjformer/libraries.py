"""FJFormer's and EasyLM's own modules of checkpoints, unmodified, without what they import and do not use."""

import importlib.machinery
import inspect
import pathlib
import sys
import types
from typing import Any
from unittest.mock import MagicMock


def bare(name: str) -> None:
    """A package whose `__init__`, which imports everything, is not run."""
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
    """FJFormer's. Its release 0.0.91 calls `callback` when there is none, so that it reads nothing without one."""

    @staticmethod
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        if "callback" in inspect.signature(Theirs.load_checkpoint).parameters:
            kwargs["callback"] = lambda tensor, key: tensor
        return Theirs.load_checkpoint(*args, **kwargs)


__all__ = ["CheckpointManager", "StreamingCheckpointer"]
