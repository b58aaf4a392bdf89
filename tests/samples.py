"""How much is tried of what takes minutes: `make test` takes every seventh point of it, and every fourth case of a test
that is long and has as many, unless it is marked as whole; `make thorough` takes all.

Of what is quick all is tried. Where the same is run again on other releases, every third or fifth case of each test is,
and as large a part of the examples that are made up.
"""

import os
import zlib
from collections.abc import Iterable
from typing import TypeVar

_T = TypeVar("_T")

EVERY = int(os.environ.get("TEST_EVERY", "7"))
CASES = int(os.environ.get("TEST_CASES", "1"))
_LONG_CASES = 1 if EVERY == 1 else 4
_FEW_EXAMPLES = 10
TRIED = "all" if EVERY == CASES == 1 else f"1 of {EVERY} points, 1 of {_LONG_CASES} long cases, 1 of {CASES} others"


def some(points: Iterable[_T], first: int = 0) -> list[_T]:
    """Every seventh of them, the first one, or the one of that number, among them.

    Tests that only differ in what happens at the points begin at other ones, so that together they take all.
    """
    return list(points)[first % EVERY :: EVERY]


def cases(test: str, count: int, *, long: bool) -> range:
    """The numbers of those of so many cases of a test that are tried. Tests begin at other ones, each at its own."""
    step = max(CASES, _LONG_CASES if long and count >= _LONG_CASES else 1)
    return range(zlib.crc32(test.encode()) % min(step, count), count, step)


def examples(count: int) -> int:
    """How many of so many examples Hypothesis makes up."""
    return max(count // CASES, _FEW_EXAMPLES)
