"""Treering saves, manages and restores the state of JAX training jobs."""

import importlib
from typing import TYPE_CHECKING, Any

from . import errors
from ._version import __version__

if TYPE_CHECKING:
    from . import formats, keep, rules
    from ._checkpoint import Checkpoint
    from ._checkpointer import Checkpointer
    from ._convert import convert
    from ._diff import Diff, diff
    from ._follow import follow
    from ._lazy import LazyArray
    from ._metrics import record
    from ._open import open_checkpoint, restore
    from ._pending import PendingSave, SaveReport
    from ._run import steps
    from ._save import save, save_async
    from ._verify import VerifyReport, verify

    open = open_checkpoint  # public, though it is not in `__all__`

# JAX and NumPy are imported by what needs them, when it is first used.
_HOMES = {
    "Checkpoint": "_checkpoint",
    "Checkpointer": "_checkpointer",
    "Diff": "_diff",
    "LazyArray": "_lazy",
    "PendingSave": "_pending",
    "SaveReport": "_pending",
    "VerifyReport": "_verify",
    "convert": "_convert",
    "diff": "_diff",
    "follow": "_follow",
    "formats": "formats",
    "keep": "keep",
    "open": "_open",
    "record": "_metrics",
    "restore": "_open",
    "rules": "rules",
    "save": "_save",
    "save_async": "_save",
    "steps": "_run",
    "verify": "_verify",
}

# Without `open`: `from treering import *` shadows nothing.
__all__ = [
    "Checkpoint",
    "Checkpointer",
    "Diff",
    "LazyArray",
    "PendingSave",
    "SaveReport",
    "VerifyReport",
    "__version__",
    "convert",
    "diff",
    "errors",
    "follow",
    "formats",
    "keep",
    "record",
    "restore",
    "rules",
    "save",
    "save_async",
    "steps",
    "verify",
]


if not TYPE_CHECKING:  # or else no name would be wrong for type checkers

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'treering' has no attribute {name!r}")
        module = importlib.import_module(f".{home}", __name__)
        value = module if name == home else getattr(module, "open_checkpoint" if name == "open" else name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "open"])
