"""Ranges of bytes."""

import bisect
from collections.abc import Iterable

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
