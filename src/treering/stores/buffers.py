"""Aligned memory: to pages, for direct I/O, and to cache lines, for JAX."""

import contextlib
import math
import mmap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

PAGE = 4096  # bytes, at multiples of which direct I/O begins and ends
_HUGE = 2 << 20
_LINE = 64  # bytes
_MOST_AXES = 32  # that an array has in every release of NumPy
_SMALL = 64 << 10  # bytes that are copied sooner than another thread would begin


def round_up(size: int, unit: int = PAGE) -> int:
    """The next multiple of `unit`."""
    return -(-size // unit) * unit


def aligned(size: int) -> memoryview:
    """A zeroed buffer of `size` bytes, rounded up to whole pages; freed with its last reference.

    Large ones ask for huge pages: a direct write from scattered small pages is split into many requests and
    takes half as long again.
    """
    size = max(round_up(size), PAGE)
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return memoryview(mmap.mmap(-1, size))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE:
        with contextlib.suppress(OSError):  # a kernel without huge pages; this is only a hint
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def copy(target: memoryview, source: "memoryview | bytes") -> None:
    """Copies as many bytes, and lets other threads of Python run meanwhile, which assigning a slice does not."""
    if len(target) != len(source):
        raise ValueError(f"{len(source)} bytes for {len(target)}")
    if len(target) < _SMALL:
        target[:] = source
        return
    import numpy as np  # what only looks at files needs none

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def adoptable(shape: tuple[int, ...], dtype: "np.dtype[Any]") -> "np.ndarray":
    """An uninitialised array that begins on a cache line: JAX's CPU backend adopts it, and copies any other.

    It is NumPy's own memory rather than a mapping: pages that were in use before come back several times as
    fast as new ones.
    """
    import numpy as np  # what only looks at files needs none

    nbytes = dtype.itemsize * math.prod(shape)
    memory = np.empty(nbytes + _LINE, np.uint8)
    begin = -memory.ctypes.data % _LINE
    return np.ndarray(shape, dtype, memory, begin)


def in_a_row(
    memory: Any, begin: int, count: int, shape: tuple[int, ...], dtype: "np.dtype[Any]", stride: int
) -> "list[np.ndarray]":
    """So many arrays of one shape, `stride` bytes apart, in some memory from a byte on; they share it."""
    import numpy as np  # what only looks at files needs none

    if count == 1 or not 0 < len(shape) < _MOST_AXES:
        return [np.ndarray(shape, dtype, memory, begin + n * stride) for n in range(count)]
    inner = np.ndarray(shape, dtype, memory, begin).strides
    return list(np.ndarray((count, *shape), dtype, memory, begin, (stride, *inner)))  # takes a third of the time
