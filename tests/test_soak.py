"""Tests that many saves and restores in one process leave no memory, threads or files behind."""

import json
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.rare
@pytest.mark.slow
def test_hundreds_of_saves_and_restores_leave_nothing_behind(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "fault_injection.soak", "300", str(tmp_path), "--quick"]
    done = subprocess.run(command, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["samples"][-1]["rounds"] == 300
    assert not outcome["grown"], outcome
