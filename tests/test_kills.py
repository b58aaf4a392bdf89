"""SIGKILL wherever a save, an overwrite or a delete touches the disk: the old or the new one is there, whole."""

import json
import pathlib
import subprocess
import sys

import pytest

from torture.scenarios import SCENARIOS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("save", "overwrite"))) for name in SCENARIOS]
)
def test_a_kill_at_any_operation_leaves_the_old_or_the_new(tmp_path: pathlib.Path, name: str) -> None:
    assert_nothing_wrong(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["save", "overwrite"])
def test_ctrl_c_at_any_operation_leaves_the_old_or_the_new_and_nothing_else(tmp_path: pathlib.Path, name: str) -> None:
    assert_nothing_wrong(name, tmp_path, "--interrupt")


def assert_nothing_wrong(name: str, place: pathlib.Path, *options: str) -> None:
    command = [sys.executable, "-m", "torture.points", name, str(place), *options]
    done = subprocess.run(command, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert not outcome["wrong"], f"{len(outcome['wrong'])} of {outcome['killed']}:\n" + outcome["wrong"][0]
    assert outcome["found"]["old"] and outcome["found"]["new"], "all were on one side of the commit"
    assert outcome["killed"] >= 15
