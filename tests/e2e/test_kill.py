"""Kills a job with `kill -9` in the middle of saves, many times. The run ends as if it had not been interrupted."""

import pathlib
import random
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import treering as tr

LOOP = """
    import sys, numpy as np, treering as tr
    run, last = sys.argv[1], int(sys.argv[2])
    with tr.Checkpointer(run, keep=tr.keep.last(2) | tr.keep.every(20)) as ckpts:
        state, step = ckpts.restore_or_init(lambda: {"x": np.zeros(1 << 19), "n": 0})
        print("from", step, flush=True)
        for step in range(step + 1, last + 1):
            state = {"x": state["x"] * 1.000001 + step, "n": state["n"] + step}
            ckpts.save(step, state)
    """


def start(run: pathlib.Path, last: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(LOOP), str(run), str(last)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_bit_identical(tmp_path: pathlib.Path) -> None:
    last, rng, longest = 60, random.Random(0), 0.12
    begun = []
    while True:
        process = start(tmp_path / "killed", last)
        assert process.stdout
        begun.append(int(process.stdout.readline().split()[1]))
        if len(begun) <= 6:
            time.sleep(rng.uniform(0, longest))
            process.kill()
        process.communicate()
        good = tr.steps(tmp_path / "killed")
        assert all(tr.verify(tmp_path / "killed" / f"step-{step:08}").ok for step in good)
        if process.returncode == 0:
            break
        longest *= 1 if good else 1.5  # A busy machine takes longer to reach the first save.
        assert not good or good[-1] >= begun[-1]  # No committed step is ever lost.
    assert begun[-1] > 0, "it was never killed after a save"
    last += 1  # A job that saves removes leftovers, and the last one may have saved nothing.
    start(tmp_path / "killed", last).communicate()
    assert start(tmp_path / "whole", last).communicate() and tr.steps(tmp_path / "whole")[-1] == last
    assert not tr.diff(tmp_path / "killed", tmp_path / "whole")
    expected = 0.0
    for step in range(1, last + 1):
        expected = expected * 1.000001 + step
    np.testing.assert_array_equal(tr.restore(tmp_path / "killed")["x"], np.full(1 << 19, expected))
    leftovers = {p.name for p in (tmp_path / "killed").iterdir()} - {
        f"step-{s:08}" for s in tr.steps(tmp_path / "killed")
    }
    assert not leftovers
    assert all(len(list(p.iterdir())) == 2 for p in (tmp_path / "killed").iterdir())
