"""How much is tried of what takes minutes: `make test` takes every fifth point of it, `make thorough` all.

Of what is quick all is tried, but on Python 3.13: there it is every fifth case of each test.
"""

import os
from collections.abc import Iterable
from typing import TypeVar

_T = TypeVar("_T")

EVERY = int(os.environ.get("TEST_EVERY", "5"))
CASES = int(os.environ.get("TEST_CASES", "1"))


def some(points: Iterable[_T], first: int = 0) -> list[_T]:
    """Every fifth of them, the first one, or the one of that number, among them.

    Tests that only differ in what happens at the points begin at other ones, so that together they take all.
    """
    return list(points)[first % EVERY :: EVERY]
