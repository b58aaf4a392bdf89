"""Whether any crash loses a checkpoint or leaves half of one: each state that it can leave is made and looked at.

As SQLite's crash tests do: all that changes the disk is recorded while something is saved, and played back to every
point, with what had not been synced lost, kept, torn or in another order.

>>> count = check(scenarios()["overwriting"], tmp_path)
"""

import contextlib
import dataclasses
import datetime
import itertools
import logging
import os
import secrets
import shutil
import traceback
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from unittest import mock

from .. import stores
from ..formats.treering import write
from ..stores.disk import Disk
from ._crashes import Crash, crashes
from ._doubles import QuickDisk
from ._mutations import HARMLESS, mutations
from ._recording import Inodes, Op, RecordingDisk, Tree
from ._scenarios import Scenario, scenarios

__all__ = [
    "HARMLESS",
    "Count",
    "Failure",
    "Recording",
    "Scenario",
    "caught",
    "check",
    "examine",
    "recorded",
    "scenarios",
]


@dataclasses.dataclass(frozen=True)
class Recording:
    """What happened in a scenario: the log of it and what was there before."""

    scenario: Scenario
    base: Inodes
    log: Sequence[Op]
    variant: str = ""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A crash after which something is wrong, and what."""

    recording: Recording
    crash: Crash
    what: str
    details: str = ""

    @property
    def where(self) -> str:
        """The scenario."""
        return self.recording.scenario.name + self.recording.variant

    def __str__(self) -> str:
        names = sorted(f"{path}{'/' if data is None else f' ({len(data)})'}" for path, data in self.crash.tree.items())
        lines = [f"{self.where}: {self.what}", str(self.crash), f"there is: {', '.join(names)}", self.details]
        return "\n".join(lines)


@dataclasses.dataclass
class Count:
    """How many recordings, operations in them, and states; `distinct` are those that were looked at.

    States of one scenario with the same files, of which the same is expected, are looked at once.
    """

    recordings: int = 0
    operations: int = 0
    states: int = 0
    distinct: int = 0
    failures: list[Failure] = dataclasses.field(default_factory=list)

    def __add__(self, other: "Count") -> "Count":
        return Count(
            self.recordings + other.recordings,
            self.operations + other.operations,
            self.states + other.states,
            self.distinct + other.distinct,
            self.failures + other.failures,
        )


def check(
    scenario: Scenario,
    folder: Path,
    *,
    kind: str = "",
    part: tuple[int, int] = (0, 1),
    seed: int = 0,
    extra: int = 0,
    most_failures: int = 1,
) -> Count:
    """Looks at every crash of a scenario, in a scratch folder, and counts.

    kind, part: see `recorded`.
    extra: states at random after each operation, by the `seed`.
    """
    total, good = Count(), set[int]()
    for recording in recorded(scenario, folder, kind=kind, part=part):
        total += examine(recording, folder, seed=seed, extra=extra, most_failures=most_failures, good=good)
        if len(total.failures) >= most_failures:
            break
    return total


def recorded(
    scenario: Scenario, folder: Path, *, kind: str = "", part: tuple[int, int] = (0, 1)
) -> Iterator[Recording]:
    """The recordings of a scenario: one, or one for each operation that fails or kills.

    kind: "sync_dir" for those operations alone: they are what decides.
    part: a number and how many parts there are: (1, 3) is every third recording from the second.
    """
    whole, tried = _record(scenario, folder, 0)
    number, parts = part
    if scenario.broken:
        points = [at for at, one in enumerate(tried, 1) if kind in ("", one)]
        for at in points[number::parts]:
            yield _record(scenario, folder, at)[0]
    elif not number:
        yield whole


def _record(scenario: Scenario, folder: Path, fail_at: int) -> tuple[Recording, list[str]]:
    root = folder / "recorded"
    root.mkdir(parents=True)
    try:
        with _repeatable():
            with _using(QuickDisk()):
                scenario.prepare(root)
            disk = RecordingDisk(str(root), fail_at=fail_at, kill=scenario.broken == "killed")
            with _using(disk):
                scenario.record(root, disk)
        disk.check()
    finally:
        shutil.rmtree(root)
    variant = f", {scenario.broken} at operation {fail_at}" if fail_at else ""
    return Recording(scenario, disk.base, disk.log, variant), disk.tried


def examine(
    recording: Recording,
    folder: Path,
    *,
    seed: int = 0,
    extra: int = 0,
    most_failures: int = 1,
    good: set[int] | None = None,
) -> Count:
    """Looks at every crash of a recording; not again at those that are known to be `good`, where it adds others."""
    count = Count(recordings=1, operations=len(recording.log))
    seen = set[int]() if good is None else good
    with _using(QuickDisk()):
        for n, crash in enumerate(crashes(recording.base, recording.log, seed=seed, extra=extra)):
            count.states += 1
            key = hash((crash.views, frozenset(crash.tree.items())))
            if not crash.views or key in seen:
                continue
            count.distinct += 1
            if problem := _problem(recording.scenario, crash, folder / f"crash-{n}"):
                count.failures.append(Failure(recording, crash, *problem))
                if len(count.failures) >= most_failures:
                    break
            else:
                seen.add(key)
    return count


def caught(recordings: Iterable[Recording], folder: Path, *, extra: int = 0) -> dict[str, Failure | None]:
    """What shows each mutation of the recordings to be one, see `_mutations`; None where nothing does."""
    found: dict[str, Failure | None] = {}
    known: dict[str, set[int]] = {}
    for recording in recordings:
        good = known.setdefault(recording.scenario.name, set())
        for name, log in mutations(recording.log, broken=bool(recording.scenario.broken)):
            if found.setdefault(name, None) is None:
                mutant = dataclasses.replace(recording, log=log)
                failures = examine(mutant, folder, extra=extra, good=good).failures
                found[name] = failures[0] if failures else None
    return found


def _problem(scenario: Scenario, crash: Crash, root: Path) -> tuple[str, str] | None:
    """What is wrong with a state and how that shows, None when nothing is."""
    _make(crash.tree, str(root))
    view = None
    try:
        view = scenario.look(root)
        if view not in crash.views:
            return f"expected to see {' or '.join(sorted(crash.views))}, found {view}", ""
        scenario.again(root, view)
    except Exception as error:
        what = "something is there in part" if view is None else "the next save fails or leaves something over"
        return f"{what} ({type(error).__name__})", "".join(traceback.format_exception(error))
    finally:
        shutil.rmtree(root)
    return None


def _make(tree: Tree, root: str) -> None:
    os.mkdir(root)
    for path, data in sorted(tree.items()):
        if data is None:
            os.mkdir(os.path.join(root, path))
            continue
        fd = os.open(os.path.join(root, path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)


@contextlib.contextmanager
def _repeatable() -> Iterator[None]:
    """Names are drawn and times told alike in every recording, so that states which are alike are the same."""
    drawn = itertools.count(1)
    clock = types.SimpleNamespace(now=lambda zone: datetime.datetime.fromtimestamp(next(drawn), zone))
    with (
        mock.patch.object(secrets, "token_hex", lambda nbytes: f"{next(drawn):0{2 * nbytes}x}"),
        mock.patch.object(write, "datetime", types.SimpleNamespace(datetime=clock, UTC=datetime.UTC)),
    ):
        yield


@contextlib.contextmanager
def _using(disk: Disk) -> Iterator[None]:
    """All of Treering uses this disk, and tells nobody what it finds damaged."""
    before, log = stores.DISK, logging.getLogger("treering")
    level = log.level
    stores.DISK = disk
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        stores.DISK = before
        log.setLevel(level)
