"""Whether any crash loses a checkpoint or leaves half of one: each state that it can leave is made and looked at.

As SQLite's crash tests do: all that changes the disk is recorded while something is saved, and played back to every
point, with what had not been synced lost, kept, torn or in another order.

>>> count = check(scenarios()["overwriting"], tmp_path)
"""

import collections
import contextlib
import dataclasses
import datetime
import itertools
import logging
import os
import shutil
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import xxhash

from treering import stores
from treering._save import save_manifest
from treering.formats.treering import metrics
from treering.stores import lease
from treering.stores.posix import Disk
from treering.testing._doubles import QuickDisk

from .mutations import HARMLESS, mutations
from .recording import Inodes, Op, RecordingDisk, Tree, View
from .scenarios import Scenario
from .scenarios_processes import together
from .scenarios_runs import runs
from .scenarios_single import foreign, native
from .scenarios_streams import streams
from .states import Crash, crashes

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


def scenarios() -> dict[str, Scenario]:
    """All of them, by name."""
    return {scenario.name: scenario for scenario in (*native(), *together(), *runs(), *streams(), *foreign())}


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
    """How many recordings, operations in them, and states, and what was looked at.

    States with the same files, of which the same is expected, count once, wherever they were made.
    """

    recordings: int = 0
    operations: int = 0
    states: int = 0
    looked_at: set[int] = dataclasses.field(default_factory=set)  # checksums
    failures: list[Failure] = dataclasses.field(default_factory=list)

    @property
    def distinct(self) -> int:
        return len(self.looked_at)

    def __add__(self, other: "Count") -> "Count":
        return Count(
            self.recordings + other.recordings,
            self.operations + other.operations,
            self.states + other.states,
            self.looked_at | other.looked_at,
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
    total, good = Count(), dict[int, View]()
    before: Recording | None = None
    for recording in recorded(scenario, folder, kind=kind, part=part):
        known = _alike(before, recording)
        total += examine(recording, folder, begin=known, seed=seed, extra=extra, most_failures=most_failures, good=good)
        before = recording
        if len(total.failures) >= most_failures:
            break
    return total


def recorded(
    scenario: Scenario, folder: Path, *, kind: str = "", part: tuple[int, int] = (0, 1)
) -> Iterator[Recording]:
    """The recordings of a scenario: one, or one for each operation that fails or kills, or two that do.

    kind: "sync_dir" for those operations alone: they are what decides.
    part: a number and how many parts there are: (1, 3) is every third recording from the second.
    """
    number, parts = part
    if not scenario.broken:
        if not number:
            yield _record(scenario, folder)[0]
        return
    _, tried = _record(scenario, folder)
    for first in _points(scenario, tried[0], kind)[number::parts]:
        once, tried = _record(scenario, folder, first)
        if scenario.broken != "killed twice":
            yield once
            continue
        for second in _points(scenario, tried[1], kind):
            yield _record(scenario, folder, first, second)[0]


def _points(scenario: Scenario, tried: Sequence[str], kind: str) -> list[int]:
    """The operations that fail or kill; one more where a process that gets to its end is followed by another."""
    points = [at for at, one in enumerate(tried, 1) if kind in ("", one)]
    return points if scenario.broken == "failing" else [*points, len(tried) + 1]


def _record(scenario: Scenario, folder: Path, *fail_at: int) -> tuple[Recording, list[list[str]]]:
    root = folder / "recorded"
    root.mkdir(parents=True)
    try:
        with _repeatable(lambda: 0), _using(QuickDisk()):
            scenario.prepare(root)
        disk = RecordingDisk(str(root), fail_at=fail_at, kill=scenario.broken.startswith("killed"))
        with _repeatable(lambda: len(disk.tried)), _using(disk):
            scenario.record(root, disk)
        disk.check()
    finally:
        shutil.rmtree(root)
    variant = f", {scenario.broken} at operation {' and '.join(map(str, fail_at))}" if fail_at else ""
    return Recording(scenario, disk.base, disk.log, variant), disk.tried


def _alike(a: Recording | None, b: Recording) -> int:
    """With how many operations both logs begin; crashes in there need to be looked at once."""
    if a is None or (a.base.folders, a.base.files) != (b.base.folders, b.base.files):
        return 0
    pairs = enumerate(zip(a.log, b.log, strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(a.log), len(b.log)))


def examine(
    recording: Recording,
    folder: Path,
    *,
    begin: int = 0,
    seed: int = 0,
    extra: int = 0,
    most_failures: int = 1,
    good: dict[int, View] | None = None,
) -> Count:
    """Looks at every crash of a recording, after `begin` operations at least.

    Not again at files that are known to be `good`, as what is seen in them, where it adds others.
    """
    count = Count(recordings=1, operations=len(recording.log))
    known = dict[int, View]() if good is None else good
    met = set[tuple[int, frozenset[View]]]()
    with _using(QuickDisk()):
        for n, crash in enumerate(crashes(recording.base, recording.log, begin=begin, seed=seed, extra=extra)):
            count.states += 1
            key = hash(frozenset(crash.tree.items()))
            if not crash.views or (key, crash.views) in met:
                continue
            met.add((key, crash.views))
            count.looked_at.add(_checksum(crash))
            if known.get(key) in crash.views:
                continue
            view, *problem = _problem(recording.scenario, crash, folder / f"crash-{n}")
            if not any(problem):
                known[key] = view
                continue
            count.failures.append(Failure(recording, crash, *problem))
            if len(count.failures) >= most_failures:
                break
    return count


def caught(
    recordings: Iterable[Recording], folder: Path, *, extra: int = 0, among: Callable[[str], bool] = lambda _: True
) -> dict[str, Failure | None]:
    """Returns the failure that reveals each mutation of the recordings, or of those `among` them; None if none does.

    See `mutations`."""
    found: dict[str, Failure | None] = {}
    known: dict[str, dict[int, View]] = {}
    before: dict[tuple[str, str], Recording] = {}  # with that mutation: what both begin with alike has been looked at
    for recording in recordings:
        subject = recording.scenario.subject or recording.scenario.name
        good = known.setdefault(subject, {})
        for name, log in mutations(recording.log, broken=bool(recording.scenario.broken)):
            if among(name) and found.setdefault(name, None) is None:
                mutant = dataclasses.replace(recording, log=log)
                begin, changed = _alike(before.get((subject, name)), mutant), _alike(recording, mutant)
                unchanged = dataclasses.replace(mutant, log=log[:changed])  # looked at last: it is to hold anyway
                failures = (
                    examine(mutant, folder, begin=max(begin, changed), extra=extra, good=good).failures
                    or examine(unchanged, folder, begin=begin, extra=extra, good=good).failures
                )
                found[name] = failures[0] if failures else None
                before[subject, name] = mutant
    return found


def _problem(scenario: Scenario, crash: Crash, root: Path) -> tuple[View, str, str]:
    """Returns the view of a state, its fault and the evidence for it; the last two are empty if it has no fault.

    The second save has the same names and times in every state, and so the same files.
    """
    _make(crash.tree, str(root))
    view = ""
    try:
        view = scenario.look(root)
        if view not in crash.views:
            return view, f"expected to see {' or '.join(sorted(crash.views))}, found {view}", ""
        with _repeatable(lambda: 999):
            scenario.again(root, view)
    except Exception as error:
        what = "something is there in part" if not view else "the next save fails or leaves something over"
        return view, f"{what} ({type(error).__name__})", "".join(traceback.format_exception(error))
    finally:
        shutil.rmtree(root)
    return view, "", ""


def _checksum(crash: Crash) -> int:
    """The same in every process, as `hash` is not."""
    state = xxhash.xxh3_64("\0".join(sorted(crash.views)).encode())
    for path, data in sorted(crash.tree.items()):
        state.update(f"\0{path}\0{-1 if data is None else len(data)}\0".encode())
        state.update(data or b"")
    return state.intdigest()


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
def _repeatable(process: Callable[[], int]) -> Iterator[None]:
    """Makes random names and times the same in every recording, so that equal states have equal bytes.

    Each process counts from a number of its own, however many numbers the one before it has used.
    """
    drawn: dict[int, Iterator[int]] = collections.defaultdict(itertools.count)

    def draw() -> int:
        number = process()
        return 1 + 10_000 * number + next(drawn[number])

    clock = types.SimpleNamespace(now=lambda zone: datetime.datetime.fromtimestamp(draw(), zone))
    with (
        mock.patch.object(os, "urandom", lambda nbytes: draw().to_bytes(nbytes, "big")),
        mock.patch.object(save_manifest, "datetime", types.SimpleNamespace(datetime=clock, UTC=datetime.UTC)),
        mock.patch.object(metrics, "time", types.SimpleNamespace(time_ns=draw)),
        mock.patch.object(lease, "_new_writer_record", return_value=b"a process"),
    ):
        yield


@contextlib.contextmanager
def _using(disk: Disk) -> Iterator[None]:
    """Makes all of Treering use this disk, and logs no warnings about damage."""
    log = logging.getLogger("treering")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with stores.using(stores.Filesystem(disk)):
            yield
    finally:
        log.setLevel(level)
