"""Tests kills at every disk operation of a save, overwrite or delete, and signals at any time.

Afterwards the old or the new checkpoint is present, complete.
"""

import itertools
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from fault_injection.interrupts import INTERRUPTED
from fault_injection.scenarios import SCENARIOS
from sampling import sample_points

pytestmark = pytest.mark.long

QUICK = ["save", "overwrite"]
SIGNALLED = ["save_async", "overwrite", "loop that saves on preemption"]
SLOW = [name for name in SCENARIOS if name not in QUICK]


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in sample_points(SLOW, first=1))]
)
def test_a_kill_at_any_operation_leaves_the_old_or_the_new(tmp_path: pathlib.Path, name: str) -> None:
    assert_old_and_new("kill_points", name, tmp_path)


@pytest.mark.rare
@pytest.mark.slow
def test_kill_around_any_operation_leaves_old_or_new(tmp_path: pathlib.Path) -> None:
    """A kill also comes after each operation. In a run, some operations fail as expected: files are missing."""
    assert_old_and_new("kill_points", "first step", tmp_path, "--thorough")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["save", "overwrite"])
def test_ctrl_c_at_any_operation_leaves_old_or_new(tmp_path: pathlib.Path, name: str) -> None:
    """Ctrl-C at any operation leaves the old or the new checkpoint, and no other files."""
    assert_old_and_new("kill_points", name, tmp_path, "--interrupt")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["overwrite", "step and retention", "delete"])
def test_kill_of_one_process_leaves_old_or_new(tmp_path: pathlib.Path, name: str) -> None:
    """The peers do not wait without end. `make faults-process` kills each of up to four processes, at every point."""
    outcome = nothing_wrong("peers", str(tmp_path / "a"), "2", "--only", name, "--every", "3")
    assert outcome["killed"] >= 5 and outcome["found"]["new"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), sample_points(itertools.product(SIGNALLED, ["SIGINT", "SIGTERM"])))
def test_a_signal_at_any_time_leaves_the_old_or_the_new(tmp_path: pathlib.Path, name: str, number: str) -> None:
    """A signal at a random time leaves the old or the new checkpoint."""
    outcome = nothing_wrong("signals", number, "10", str(tmp_path / "a"), "--only", name)
    assert sum(outcome["found"].values()) == 10


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERRUPTED)
def test_ctrl_c_anywhere_in_python_hangs_no_process(tmp_path: pathlib.Path, name: str) -> None:
    """Ctrl-C between any two bytecodes hangs no thread, and the call raises KeyboardInterrupt.

    Thread.start and Condition.wait are Python code too, so an interrupt may leave them with or without a lock.
    This test interrupts at every ninth place, `make faults-process` at every place.
    """
    assert nothing_wrong("interrupts", str(tmp_path / "a"), "--only", name, "--every", "9")["killed"] > 22


def assert_old_and_new(module: str, *options: object) -> None:
    outcome = nothing_wrong(module, *options)
    assert outcome["found"]["old"] and outcome["found"]["new"], "all were on one side of the commit"
    assert outcome["killed"] >= 15


def nothing_wrong(module: str, *options: object) -> Any:
    command = [sys.executable, "-m", f"fault_injection.{module}", *map(str, options)]
    done = subprocess.run(command, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert not outcome["wrong"], f"{len(outcome['wrong'])} of {outcome['killed']}:\n" + outcome["wrong"][0]
    return outcome
