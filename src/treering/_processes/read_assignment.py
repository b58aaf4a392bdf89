"""Divides the bytes that several processes read for one another. Every process computes the same answer."""

import bisect
import itertools
from collections.abc import Sequence

Rounds = list[list[list[int]]]  # by round, then by process: the numbers of the items that it reads and sends
_MIN_READ_BYTES = 1 << 20  # bytes; with less than this for each process, only some of the processes read


def assign_reads(nbytes: Sequence[int], processes: int, most: int, first: int = 0) -> Rounds:
    """Divides items, in the order of the disk, so that each process reads one run of about equal size.

    `nbytes` are the sizes of the items. A process sends at most `most` bytes per round, except a single item that is
    larger. If there is less than a megabyte for each process, fewer processes read. They begin with process `first`,
    so that callers can rotate the readers from call to call.
    """
    *starts, total = itertools.accumulate(nbytes, initial=0)
    readers = max(1, min(processes, total // _MIN_READ_BYTES))
    edges = [bisect.bisect_left(starts, total * n // readers) for n in range(readers)] + [len(nbytes)]
    rounds: Rounds = []
    for n, (begin, end) in enumerate(itertools.pairwise(edges)):
        process = (first + n * processes // readers) % processes
        for at, chunk in enumerate(_chunks(nbytes, begin, end, most)):
            if at == len(rounds):
                rounds.append([[] for _ in range(processes)])
            rounds[at][process] = chunk
    return rounds


def _chunks(nbytes: Sequence[int], begin: int, end: int, most: int) -> list[list[int]]:
    chunks: list[list[int]] = []
    held = most + 1
    for n in range(begin, end):
        if held + nbytes[n] > most:
            chunks.append([])
            held = 0
        chunks[-1].append(n)
        held += nbytes[n]
    return chunks
