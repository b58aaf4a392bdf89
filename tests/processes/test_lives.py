"""Tests jobs of several processes in which a process is killed, started again, or ends earlier than its peers."""

import pathlib

import numpy as np
import pytest

import treering as tr
from jobs import run_job

# A loop that begins again with `restore_or_init` when a peer has died, as the program of a recoverable job does.
LOOP = """
def init():
    return {"w": np.zeros(6), "n": 0}

def loop(last, die_at=None):
    starts = []
    while True:
        ckpts = tr.Checkpointer(tmp / "run", timeout=8)
        try:
            state, step = ckpts.restore_or_init(init)
            starts.append([step, state["n"], bool((state["w"] == step).all())])
            for step in range(step + 1, last + 1):
                state = {"w": np.full(6, float(step)), "n": step}
                ckpts.save(step, state)
                if step == die_at and LIFE == 1:
                    ckpts.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
            ckpts.close()
            return starts
        except PeerError as error:
            lines.append(str(error))
lines = []
"""


@pytest.mark.slow
@pytest.mark.compat
@pytest.mark.parametrize("dies", ["between calls", "in a save", "in a restore", "before its first call"])
def test_restarted_process_meets_its_peers_at_the_latest_step(tmp_path: pathlib.Path, dies: str) -> None:
    """The second life of a process restores what the job has saved, and reads no answer of its first life."""
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"w": np.full(6, float(step)), "n": step})
    body = f"""{LOOP}
if INDEX == 1 and LIFE == 1:
    match DIES:
        case "in a save":
            die_at("sync", "step-00000004")
        case "in a restore":
            die_at("open", "arrays-")
        case "before its first call":
            os.kill(os.getpid(), signal.SIGKILL)
starts = loop(6, die_at=4 if INDEX == 1 and DIES == "between calls" else None)
report([starts, tr.steps(tmp / "run"), lines])
"""
    results = run_job(tmp_path, body, processes=3, devices=1, recoverable=True, restarts=[1], DIES=dies)
    reports = [result.report for result in results]
    assert [one[1] for one in reports] == [[1, 2, 3, 4, 5, 6]] * 3
    assert all(ok for one in reports for _, _, ok in one[0])
    first = {"between calls": [4], "in a save": [2, 3]}.get(dies, [2])  # A save begins before the last one is over.
    (met,) = {one[0][-1][0] for one in reports}
    assert met in first and len(reports[1][0]) == 1


@pytest.mark.slow
def test_restarted_process_learns_where_process_0_is(tmp_path: pathlib.Path) -> None:
    """A restarted process whose peers make no call gets an error that names the last call of process 0."""
    body = """
ckpts = tr.Checkpointer(tmp / "run", timeout=4)
if LIFE == 1:
    state, step = ckpts.restore_or_init(lambda: {"n": 0})
    ckpts.save(1, {"n": 1}).result()
    if INDEX == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(8)
else:
    report(caught(lambda: ckpts.restore_or_init(lambda: {"n": 0})))
"""
    _, result = run_job(tmp_path, body, processes=2, devices=1, recoverable=True, restarts=[1])
    kind, text = result.report
    assert kind == "PeerError" and "process 0 (not in this call; its last is" in text and ".save(1))" in text
    assert "this process was started again in its job" in text
