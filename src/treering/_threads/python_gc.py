"""Python's garbage collector, kept out of the way while thousands of leaves are handled."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """No collection within the block: none of what is made there is garbage, and looking costs as long as the work."""
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()
