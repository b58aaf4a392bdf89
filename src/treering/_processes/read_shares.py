"""Dealing out what several processes read for one another: pure functions, with the same result in every process."""

import bisect
import itertools
from collections.abc import Sequence

Rounds = list[list[list[int]]]  # by round, then by process: the numbers of what it reads and sends
_LEAST_BYTES = 1 << 20  # bytes that are worth reading; of less than that for each, only some of the processes read


def deal(nbytes: Sequence[int], processes: int, most: int, first: int = 0) -> Rounds:
    """Deals out items of so many bytes, in the order of the disk: each process reads one run of about equal size.

    A process sends at most `most` bytes a round, but for a single item that is larger. Where all have less than a
    megabyte each, fewer of them read, from the number `first` on, so that they take turns from call to call.
    """
    *starts, total = itertools.accumulate(nbytes, initial=0)
    readers = max(1, min(processes, total // _LEAST_BYTES))
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
