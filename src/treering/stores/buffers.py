"""Memory that is aligned to pages for direct I/O, and to cache lines for JAX; ranges of bytes."""

import bisect
import contextlib
import math
import mmap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

Range = tuple[int, int]  # the first byte, and the byte after the last


def merge(ranges: Iterable[Range]) -> list[Range]:
    """Returns the ranges sorted, with touching and overlapping ones joined."""
    out: list[Range] = []
    for begin, end in sorted(ranges):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def claim_range(taken: list[Range], begin: int, end: int) -> bool:
    """Adds a range to `taken`, whose ranges are sorted and do not touch. Returns False if a part of it is taken."""
    n = bisect.bisect_left(taken, (end, end))  # the first range that begins after it
    if n and taken[n - 1][1] > begin:
        return False
    if n and taken[n - 1][1] == begin:
        n -= 1
        begin = taken.pop(n)[0]
    if n < len(taken) and taken[n][0] == end:
        end = taken.pop(n)[1]
    taken.insert(n, (begin, end))
    return True


if TYPE_CHECKING:
    import numpy as np

PAGE = 4096  # bytes; direct I/O begins and ends at multiples of it
_HUGE_PAGE_BYTES = 2 << 20  # bytes of a huge page
_CACHE_LINE_BYTES = 64  # bytes of a cache line
_MAX_AXES = 32  # axes that an array may have in every release of NumPy
_MAX_LOCKED_COPY_BYTES = 64 << 10  # bytes; copying fewer takes less time than switching to another thread


def round_up(size: int, unit: int = PAGE) -> int:
    """Returns `size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


def aligned(size: int) -> memoryview:
    """Returns a zeroed buffer of `size` bytes, rounded up to full pages. It is freed with its last reference.

    Large buffers ask for huge pages. The kernel splits a direct write from scattered small pages into many requests,
    which takes half as long again.
    """
    size = max(-(-size // PAGE) * PAGE, PAGE)
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return memoryview(mmap.mmap(-1, size))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages; this is only a hint
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def copy(target: memoryview, source: "memoryview | bytes") -> None:
    """Copies bytes between buffers of equal size.

    Unlike a slice assignment, it lets other Python threads run meanwhile.
    """
    if len(target) != len(source):
        raise ValueError(f"{len(source)} bytes for {len(target)}")
    if len(target) < _MAX_LOCKED_COPY_BYTES:
        target[:] = source
        return
    import numpy as np  # Imported late: commands that only list files start faster without it.

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def empty_aligned_array(shape: tuple[int, ...], dtype: "np.dtype[Any]") -> "np.ndarray":
    """Returns an uninitialised array that begins on a cache line.

    JAX's CPU backend adopts such an array without a copy. The memory comes from NumPy instead of a mapping: NumPy
    reuses pages, which are several times as fast as new ones.
    """
    import numpy as np  # Imported late: commands that only list files start faster without it.

    nbytes = dtype.itemsize * math.prod(shape)
    memory = np.empty(nbytes + _CACHE_LINE_BYTES, np.uint8)
    begin = -memory.ctypes.data % _CACHE_LINE_BYTES
    return np.ndarray(shape, dtype, memory, begin)


def strided_arrays(
    memory: Any, begin: int, count: int, shape: tuple[int, ...], dtype: "np.dtype[Any]", stride: int
) -> "list[np.ndarray]":
    """Returns `count` arrays of one shape that share `memory`. They start at byte `begin`, `stride` bytes apart."""
    import numpy as np  # Imported late: commands that only list files start faster without it.

    if count == 1 or not 0 < len(shape) < _MAX_AXES:
        return [np.ndarray(shape, dtype, memory, begin + n * stride) for n in range(count)]
    inner = np.ndarray(shape, dtype, memory, begin).strides
    return list(np.ndarray((count, *shape), dtype, memory, begin, (stride, *inner)))  # a third of the loop's time
