"""How much is tried of what takes minutes: `make test` takes every fifth point of it, and every third case of a test
that is long and has four or more; `make thorough` takes all.

Of what is quick all is tried, but on Python 3.13: there it is every fifth case of each test.
"""

import os
import zlib
from collections.abc import Iterable
from typing import TypeVar

_T = TypeVar("_T")

EVERY = int(os.environ.get("TEST_EVERY", "5"))
CASES = int(os.environ.get("TEST_CASES", "1"))
_LONG_CASES = 1 if EVERY == 1 else 3
_FEW_CASES = 3
TRIED = "all" if EVERY == CASES == 1 else f"1 of {EVERY} points, 1 of {_LONG_CASES} long cases, 1 of {CASES} others"


def some(points: Iterable[_T], first: int = 0) -> list[_T]:
    """Every fifth of them, the first one, or the one of that number, among them.

    Tests that only differ in what happens at the points begin at other ones, so that together they take all.
    """
    return list(points)[first % EVERY :: EVERY]


def cases(test: str, count: int, *, long: bool) -> range:
    """The numbers of those of so many cases of a test that are tried. Tests begin at other ones, each at its own."""
    step = max(CASES, _LONG_CASES if long and count > _FEW_CASES else 1)
    return range(zlib.crc32(test.encode()) % min(step, count), count, step)
