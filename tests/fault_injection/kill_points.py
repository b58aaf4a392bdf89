"""`python -m fault_injection.kill_points SCENARIO DIRECTORY [--thorough]`: SIGKILL at every operation on the disk.

With `--interrupt` it is ctrl-C instead, after which nothing may be left over, for the child tidies up itself.

It is a program of its own because its children are forked: the process of the tests has too many threads for that.
"""

import collections
import functools
import itertools
import json
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Literal, NamedTuple

from treering import stores
from treering.testing._doubles import QuickDisk, SignallingDisk

from . import forked_child
from .scenarios import SCENARIOS, Scenario

When = Literal["before", "within", "after"]


class Outcome(NamedTuple):
    """How many children were killed, what was there afterwards how often, and what was wrong."""

    killed: int
    found: dict[str, int]
    wrong: list[str]


def killed_everywhere(scenario: Scenario, directory: Path, *, thorough: bool = False) -> Outcome:
    """Kills at the first operation, the second, … until there are no more: half way through writes, before others.

    Thorough is before, within and after each; without threads that would be the same.
    """
    found: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    stores.register(stores.Filesystem(QuickDisk()))  # no test of this kind can tell whether anything is durable
    scenario.prepare(directory / "before")
    (directory / "before").mkdir(exist_ok=True)
    times: tuple[When, ...] = ("before", "within", "after") if thorough else ("within",)
    at, alive = 1, False
    while not alive:
        for when in times:
            place = directory / "place"
            shutil.copytree(directory / "before", place)
            code = forked_child.end(forked_child.start(functools.partial(_perform, scenario, place, at, when)))
            alive = code >= 0  # it has no such operation
            if code not in (0, -signal.SIGKILL):
                wrong.append(f"operation {at}, {when}: the child ended with {code}")
            try:
                found["new, alive" if alive else scenario.look(place)] += 1
                scenario.go_on(place)
            except Exception:
                wrong.append(f"operation {at}, {when}:\n{traceback.format_exc()}")
            shutil.rmtree(place)
            if alive:
                break
        at += 1
    found.pop("new, alive", 0)
    return Outcome(sum(found.values()), dict(found), wrong)


def interrupted_everywhere(scenario: Scenario, directory: Path) -> Outcome:
    """Interrupts at the first operation, the second, … until there are no more."""
    found: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    stores.register(stores.Filesystem(QuickDisk()))
    scenario.prepare(directory / "before")
    (directory / "before").mkdir(exist_ok=True)
    clean = _files(directory / "before")
    for at in itertools.count(1):
        place = directory / "place"
        shutil.copytree(directory / "before", place)
        code = forked_child.end(forked_child.start(functools.partial(_interrupt, scenario, place, at)))
        if code == 0:
            break
        try:
            assert code == forked_child.RAISED, f"the child ended with {code}"
            state = scenario.look(place)
            assert state == "new" or _files(place) == clean, f"left over: {_files(place)}"
            scenario.go_on(place)
            found[state] += 1
        except Exception:
            wrong.append(f"operation {at}:\n{traceback.format_exc()}")
        shutil.rmtree(place)
    return Outcome(sum(found.values()), dict(found), wrong)


def _files(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


def _perform(scenario: Scenario, place: Path, at: int, when: When) -> None:
    stores.register(stores.Filesystem(SignallingDisk(at, when, signal.SIGKILL)))
    scenario.act(place)


def _interrupt(scenario: Scenario, place: Path, at: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may have it ignored
    disk = SignallingDisk(at, "before", signal.SIGINT)
    stores.register(stores.Filesystem(disk))
    scenario.act(place)
    if disk.count >= at:
        raise KeyboardInterrupt  # which came when all was done


if __name__ == "__main__":
    chosen = SCENARIOS[sys.argv[1]], Path(sys.argv[2])
    if "--interrupt" in sys.argv:
        outcome = interrupted_everywhere(*chosen)
    else:
        outcome = killed_everywhere(*chosen, thorough="--thorough" in sys.argv)
    print(json.dumps(outcome._asdict()))
