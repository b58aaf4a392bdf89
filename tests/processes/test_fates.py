"""Tests what peers see of a process that dies, stops, ends or is late. docs/explanation/scale.md has the table."""

import pathlib
from typing import Any

import pytest

import treering as tr
from jobs import run_job

FATES = [
    *((fate, call) for fate in ("killed", "stopped", "late") for call in ("save", "restore", "close", "between")),
    *(("ended", call) for call in ("close", "between")),
]


@pytest.mark.slow
@pytest.mark.compat
@pytest.mark.parametrize(("fate", "call"), FATES)
def test_peers_learn_the_fate_of_a_process(tmp_path: pathlib.Path, fate: str, call: str) -> None:
    options: dict[str, Any] = {"devices": 1, "recoverable": fate == "killed", "expect": {2: None}, "timeout": 90}
    results = run_job(tmp_path, "fates.body", processes=3, FATE=fate, CALL=call, **options)
    for error, met, steps in [result.report for result in results[:2]]:
        if fate == "late" or call == "close":  # Process 0 uploads alone.
            assert error is None
        else:
            assert error and error[0] == "PeerError" and "process 2 (" in error[1]
            says = "ended without this call" if fate == "ended" else "dead, stopped or cut off"
            assert says in error[1], error[1]
        assert met is None and (2 in steps) == (fate == "late" and call in ("save", "between"))
        assert (9 in steps) == (fate in ("stopped", "late"))
    assert tr.verify(tmp_path / "run").ok
