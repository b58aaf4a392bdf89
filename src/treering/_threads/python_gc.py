"""Pauses Python's garbage collector while Treering handles thousands of leaves."""

import contextlib
import gc
import os
from collections.abc import Iterator

_pauses: list[None] = []  # one for each block that has disabled it


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disables garbage collection within the block.

    The objects made there are not garbage, and searching them would take as long as the work itself.
    """
    if not gc.isenabled():
        yield
        return
    try:
        _pauses.append(None)
        gc.disable()
        yield
    finally:
        _pauses.pop()
        gc.enable()


def _resume_in_child() -> None:
    """Enables it in a forked child, which lacks the thread that would."""
    if _pauses:
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_resume_in_child)
