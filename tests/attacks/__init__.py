"""Files that are built to do harm: what each tries, on which format, and code that makes it.

An attack is a function that lays something out in an empty folder and returns the path to be opened. The oracle is in
`trial`: opening, restoring, verifying and converting it each raise a `TreeringError` soon and in little memory, and
nothing outside of the folder is read or written.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

Make = Callable[[Path], Path]
Verdict = Literal["refused", "unread", "right", "harmless"]

CANARY = b"the canary that nobody may hear!"  # what lies in a file outside of the folder
OUTSIDE = "outside"  # the folder with that file, beside the folder of the attack


class Attack(NamedTuple):
    """What is tried on a format, in a line, and how.

    verdict: "refused" must not be restored, verified and converted, "unread" not restored; "right" may be, as what was saved (`subjects.tree`); "harmless" as whatever
    it says itself, if nothing else happens.
    """

    name: str
    format: str
    tries: str
    make: Make
    verdict: Verdict
    slow: bool


ATTACKS: dict[str, Attack] = {}
"""By format and name: ``orbax/chunk of a gigabyte of zeros, in gzip``."""


def add(format: str, name: str, tries: str, make: Make, verdict: Verdict = "refused", *, slow: bool = False) -> None:
    """Adds an attack to the corpus."""
    key = f"{format}/{name}"
    assert key not in ATTACKS, key
    ATTACKS[key] = Attack(name, format, tries, make, verdict, slow)


def attack(format: str, tries: str, verdict: Verdict = "refused", *, slow: bool = False) -> Callable[[Make], Make]:
    """Adds the function as an attack, which is called as it is."""

    def register(make: Make) -> Make:
        add(format, getattr(make, "__name__", "").strip("_").replace("_", " "), tries, make, verdict, slow=slow)
        return make

    return register


def load() -> dict[str, Attack]:
    """The whole corpus."""
    from . import anywhere, equinox, msgpack, names, native, safetensors, tensorflow, zarr  # noqa: F401

    return ATTACKS
