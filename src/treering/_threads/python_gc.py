"""Pausing Python's garbage collector while thousands of leaves are handled."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disables collection within the block: nothing made there is garbage, and a search costs as much as the work."""
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()
