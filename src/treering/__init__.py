"""Treering saves, manages and restores the state of JAX training jobs."""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from . import _printable, errors
from ._pytree.jax_private import imported_job_state
from ._version import __version__

if TYPE_CHECKING:
    from . import formats, keep, rules
    from ._core.lazy import LazyArray
    from ._publish.follower import follow_weights
    from ._publish.publisher import Publisher
    from ._restore.checkpoint import Checkpoint
    from ._run.checkpointer import Checkpointer
    from ._run.follow import follow
    from ._run.metrics import record
    from ._run.open import open_checkpoint, restore
    from ._run.run_layout import steps
    from ._save.pending import PendingSave, SaveReport
    from ._save.save import save, save_async
    from ._tools.convert import convert
    from ._tools.diff import Diff, diff
    from ._tools.report import report
    from ._tools.stats import stats
    from ._tools.verify import VerifyReport, verify
    from ._tools.view import view

    open = open_checkpoint  # public, though it is not in `__all__`

logging.getLogger("treering").addFilter(_printable.escape_record)

# Public names are imported on first use, so that `import treering` does not import JAX and NumPy.
_HOMES = {
    "Checkpoint": "_restore.checkpoint",
    "Checkpointer": "_run.checkpointer",
    "Diff": "_tools.diff",
    "LazyArray": "_core.lazy",
    "PendingSave": "_save.pending",
    "Publisher": "_publish.publisher",
    "SaveReport": "_save.pending",
    "VerifyReport": "_tools.verify",
    "convert": "_tools.convert",
    "diff": "_tools.diff",
    "follow": "_run.follow",
    "follow_weights": "_publish.follower",
    "formats": "formats",
    "keep": "keep",
    "open": "_run.open",
    "record": "_run.metrics",
    "report": "_tools.report",
    "restore": "_run.open",
    "rules": "rules",
    "save": "_save.save",
    "save_async": "_save.save",
    "stats": "_tools.stats",
    "steps": "_run.run_layout",
    "verify": "_tools.verify",
    "view": "_tools.view",
}

# It lacks `open`, so that `from treering import *` does not shadow the built-in function.
__all__ = [
    "Checkpoint",
    "Checkpointer",
    "Diff",
    "LazyArray",
    "PendingSave",
    "Publisher",
    "SaveReport",
    "VerifyReport",
    "__version__",
    "convert",
    "diff",
    "errors",
    "follow",
    "follow_weights",
    "formats",
    "keep",
    "record",
    "report",
    "restore",
    "rules",
    "save",
    "save_async",
    "stats",
    "steps",
    "verify",
    "view",
]


if (_job := imported_job_state()) and _job.client is not None:
    # Signs of life begin at import: peers must distinguish a process that makes no call from a dead one.
    from ._processes import coordinator as _coordinator

    _coordinator.announce_alive()

if not TYPE_CHECKING:  # With `__getattr__`, type checkers would accept every name.

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            from ._core import migration_hints

            message = f"module 'treering' has no attribute {name!r}"
            raise AttributeError(
                migration_hints.with_hint(message, migration_hints.MODULE_CALLS[name])
                if name in migration_hints.MODULE_CALLS
                else message
            )
        module = importlib.import_module(f".{home}", __name__)
        value = module if name == home else getattr(module, "open_checkpoint" if name == "open" else name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "open"])
