"""What a scenario is: something is under way when the crash comes, and something must be true after it."""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from treering._run.open import restore
from treering._tools.verify import verify

from .recording import RecordingDisk, View

NOTHING = "nothing"
Record = Callable[[Path, RecordingDisk], None]
Broken = Literal["", "failing", "killed", "killed twice"]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """`record` is what happens after `prepare`; it says what is expected. Both get the folder in which all happens.

    `look` returns the view after a crash and raises if anything is incomplete; `again` gets that view, saves once more
    and raises unless that works and tidies up. With `broken`, `record` is repeated with each operation failing in
    turn: by itself, or with all that come after it, until `record` says that another process begins; which may be
    killed as well, at each operation of its own. Scenarios of one `subject` look and save again alike: what one
    finds in some files holds for all of them. Without any, a scenario is alone.
    """

    name: str
    record: Record
    look: Callable[[Path], View]
    again: Callable[[Path, View], None]
    prepare: Callable[[Path], None] = lambda root: None
    broken: Broken = ""
    subject: str = ""


@functools.cache
def tree(label: str) -> dict[str, Any]:
    """A state of its own for every label, all of the same shape. Labels that end in "s" have the same `w`."""
    chance = np.random.default_rng(zlib.crc32(label.encode()))
    shared = np.random.default_rng(0) if label.endswith("s") else chance
    return {
        "w": shared.standard_normal(560_000 if label.startswith("large") else 30, np.float32),
        "b": {"i": chance.integers(-99, 99, (3, 5), np.int16), "e": np.zeros(0, np.int8)},
    }


def _identity(found: Any) -> Any:
    return {path: (a.dtype, a.shape, a.tobytes()) for path, a in (("w", found["w"]), *found["b"].items())}


@functools.cache
def _expected(label: str) -> Any:
    return _identity(tree(label))


def label_at(path: str | Path, labels: Sequence[str]) -> str:
    """Returns the label of the tree at a path. Raises `AssertionError` if it is none, or incomplete."""
    report = verify(path)
    assert report.ok, report
    found = _identity(restore(path))
    label = next((label for label in labels if _expected(label) == found), None)
    assert label is not None, f"{path}: it verifies, but is nothing that was saved"
    return label
