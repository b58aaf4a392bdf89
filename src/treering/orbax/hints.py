"""Judges options that only tune Orbax itself: Treering has no use for them, and says so."""

import functools
import logging
from typing import Any

from .errors import UnsupportedValueError

_log = logging.getLogger("treering")


def warn_unused(owner: str, **options: tuple[Any, Any]) -> None:
    """Logs the options that differ from their defaults, once for each. An option is a value and its default."""
    for name, (value, default) in options.items():
        if value is not default and value != default:
            _warn_once(f"{owner}: {name}= has no effect; Treering chooses its own files and buffers")


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


def check_processes(options: Any) -> None:
    """Raises `UnsupportedValueError` for `MultiprocessingOptions` that exclude processes or choose a primary one."""
    if getattr(options, "active_processes", None) is not None:
        raise UnsupportedValueError(
            "active_processes: expected None, because all processes save; for a save of one process, use "
            "treering.save(processes='this')"
        )
    if getattr(options, "primary_host", 0) not in (0, None):
        raise UnsupportedValueError("primary_host: expected 0, because process 0 commits")
