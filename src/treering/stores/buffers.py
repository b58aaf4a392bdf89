"""Page-aligned memory, as direct I/O wants it."""

import mmap

from .disk import PAGE

_HUGE = 2 << 20


def round_up(size: int, unit: int = PAGE) -> int:
    """The next multiple of `unit`."""
    return -(-size // unit) * unit


def aligned(size: int) -> memoryview:
    """A zeroed buffer of `size` bytes, rounded up to whole pages; freed with its last user.

    Large ones ask for huge pages: a direct write from scattered small pages is split into many requests and
    takes half as long again.
    """
    size = max(round_up(size), PAGE)
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return memoryview(mmap.mmap(-1, size))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
