"""Files built to do harm: what each attack tries, on which format, and the code that makes it.

An attack is a function that creates files in an empty folder and returns the path to be opened. `trial` checks what
happens: opening, restoring, verifying and converting each raise a `TreeringError` soon and in little memory, and
Treering neither reads nor writes anything outside the folder.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

Make = Callable[[Path], Path]
Verdict = Literal["refused", "unread", "right", "harmless"]

CANARY = b"a canary that must not be read!!"  # contents of a file outside the folder
OUTSIDE = "outside"  # the folder with that file, next to the attack's folder


class Attack(NamedTuple):
    """Describes an attack: its format, one line about what it tries, and the function that makes it.

    verdict: the right outcome. "refused": restoring, verifying and converting must fail. "unread": only restoring must
    fail. "right": if it can be read, the result must be `subjects.tree`. "harmless": it may be read as anything.
    """

    name: str
    format: str
    tries: str
    make: Make
    verdict: Verdict
    slow: bool


ATTACKS: dict[str, Attack] = {}
"""The corpus, by format and name: ``orbax/chunk of a gigabyte of zeros, in gzip``."""


def add(format: str, name: str, tries: str, make: Make, verdict: Verdict = "refused", *, slow: bool = False) -> None:
    """Adds an attack to the corpus."""
    key = f"{format}/{name}"
    assert key not in ATTACKS, key
    ATTACKS[key] = Attack(name, format, tries, make, verdict, slow)


def attack(format: str, tries: str, verdict: Verdict = "refused", *, slow: bool = False) -> Callable[[Make], Make]:
    """Returns a decorator that adds the function as an attack, named after the function."""

    def register(make: Make) -> Make:
        add(format, getattr(make, "__name__", "").strip("_").replace("_", " "), tries, make, verdict, slow=slow)
        return make

    return register


def load() -> dict[str, Attack]:
    """Returns the entire corpus."""
    from . import any_format, equinox, keras, msgpack, names, native, safetensors, tensorflow, torch, zarr  # noqa: F401

    return ATTACKS
