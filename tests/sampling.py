"""Chooses the part of the slow tests that one run tries; `make thorough` tries all of them.

`make test` tries one of seven points, such as the requests at which a job is killed. Of a test that is marked `long` or
`slow` it tries one case of four; with fewer than four cases, it sometimes tries none: a test of one case runs every
second time. A test marked `whole` always runs with all cases. One of four tests marked `rare` runs.

The commit decides which ones, so every change tries others. After twenty commits one point of twenty has not run yet,
and one case of three hundred. `TEST_SEED` overrides the commit; the summary of the tests prints the seed. A test that
is called by its name (`FILE::TEST`) runs with all of its cases.
"""

import os
import subprocess
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")


def _commit_hash() -> str:
    """Returns the beginning of the commit's hash, or "release" if the tests are not in the project's own repository."""
    command = ["git", "rev-parse", "HEAD:tests/sampling.py", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "release"
    return done.stdout.split()[1][:12]


STRIDE = int(os.environ.get("TEST_STRIDE", "7"))
SEED = os.environ.get("TEST_SEED") or _commit_hash()
_LONG_STRIDE = 1 if STRIDE == 1 else 4
SAMPLE_TEXT = (
    "all"
    if STRIDE == 1
    else f"1 of {STRIDE} points, 1 of {_LONG_STRIDE} long cases and rare tests, by TEST_SEED={SEED}"
)


def sample_points(points: Iterable[_T], first: int = 0) -> list[_T]:
    """Returns every seventh point, and at least one.

    Tests that differ only in what happens at the points pass different numbers as `first`, so that together they try
    all points.
    """
    known = list(points)
    return known[(first + _hash(SEED)) % (min(STRIDE, len(known)) or 1) :: STRIDE]


def long_cases(test: str, count: int) -> range:
    """Returns the numbers of the cases of a long test that are tried. Each test begins at another case."""
    step = min(_LONG_STRIDE, count + 1)
    return range(_hash(test + SEED) % step, count, step)


def parity(test: str) -> int:
    """Returns 0 or 1: the first of every second case of a test that `make quick` leaves out."""
    return _hash(test + SEED) % 2


def is_sampled(test: str) -> bool:
    """Returns True if a rare test is tried."""
    return _hash(SEED + test) % _LONG_STRIDE == 0


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())
