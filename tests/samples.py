"""How much is tried of what takes minutes; `make thorough` tries all of it.

`make test` tries one of seven points, such as the requests at which a job is killed; one of four cases of a test that
is marked as `long` or `slow`, unless it is `whole`; and one of four of the tests that are marked as `rare`. Which ones
depends on the commit, so that they are others after each change: after twenty changes one point of twenty is still to
come, and one of three hundred cases. `TEST_SEED` chooses instead; what the tests print at their end says which seed
they had. A test that is called by its name (`FILE::TEST`) is run with all of its cases.
"""

import os
import subprocess
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")


def _commit() -> str:
    """The beginning of the hash of the commit, or "release" where the tests lie in no repository of their own."""
    command = ["git", "rev-parse", "HEAD:tests/samples.py", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "release"
    return done.stdout.split()[1][:12]


EVERY = int(os.environ.get("TEST_EVERY", "7"))
SEED = os.environ.get("TEST_SEED") or _commit()
_ONE_OF = 1 if EVERY == 1 else 4
TRIED = "all" if EVERY == 1 else f"1 of {EVERY} points, 1 of {_ONE_OF} long cases and rare tests, by TEST_SEED={SEED}"


def some(points: Iterable[_T], first: int = 0) -> list[_T]:
    """Every seventh of them, and at least one.

    Tests that only differ in what happens at the points pass numbers of their own as `first`: they begin at other
    points, so that together they take all.
    """
    known = list(points)
    return known[(first + _number(SEED)) % (min(EVERY, len(known)) or 1) :: EVERY]


def long_cases(test: str, count: int) -> range:
    """The numbers of those of so many cases of a long test that are tried. Each test begins at another one."""
    step = min(_ONE_OF, count)
    return range(_number(test + SEED) % step, count, step)


def is_tried(test: str) -> bool:
    """Whether a rare test is tried."""
    return _number(SEED + test) % _ONE_OF == 0


def _number(text: str) -> int:
    return zlib.crc32(text.encode())
