"""Page-aligned memory, as direct I/O wants it."""

import mmap

from .disk import PAGE


def round_up(size: int, unit: int = PAGE) -> int:
    """The next multiple of `unit`."""
    return -(-size // unit) * unit


def aligned(size: int) -> memoryview:
    """A zeroed buffer of `size` bytes, rounded up to whole pages; freed with its last user."""
    return memoryview(mmap.mmap(-1, max(round_up(size), PAGE)))
