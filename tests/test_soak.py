"""Many saves and restores in one process: nothing grows."""

import json
import pathlib
import subprocess
import sys

import pytest

from torture.soak import Sample


@pytest.mark.slow
def test_hundreds_of_saves_and_restores_leave_nothing_behind(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "torture.soak", "300", str(tmp_path), "--quick"]
    done = subprocess.run(command, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    first, *_, last = [Sample(**sample) for sample in json.loads(done.stdout)]
    assert last.rounds == 300
    assert last.descriptors == first.descriptors
    assert last.threads <= 1 + 3  # those of the last save may not have ended yet
    assert last.disk <= first.disk + (1 << 20)  # an array file more while a deletion failed
    assert last.memory <= first.memory + (8 << 20)  # the state is 0.5 MB, so that one state kept in 17 rounds shows
