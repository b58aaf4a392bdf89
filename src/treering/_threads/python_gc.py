"""Pauses Python's garbage collector while Treering handles thousands of leaves."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disables garbage collection within the block.

    The objects made there are not garbage, and searching them would take as long as the work itself.
    """
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()
