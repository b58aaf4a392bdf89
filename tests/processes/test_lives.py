"""Tests jobs of several processes in which a process is killed, started again, or ends earlier than its peers."""

import pathlib
import socket
import subprocess
import sys

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
def test_restarted_process_is_preempted_with_its_peers(tmp_path: pathlib.Path) -> None:
    """The second life asks JAX's preemption service with the numbers of its peers, also while these are in a step."""
    results = run_job(
        tmp_path,
        "lives.restarted_process_is_preempted_with_its_peers",
        processes=2,
        devices=1,
        recoverable=True,
        restarts=[1],
    )
    (step, saved), other = (result.report for result in results)
    assert other == [step, saved] and step == saved and 40 < step < 399


@pytest.mark.slow
def test_restarted_process_learns_where_process_0_is(tmp_path: pathlib.Path) -> None:
    """A restarted process whose peers make no call gets an error that names the last call of process 0."""
    _, result = run_job(
        tmp_path,
        "lives.restarted_process_learns_where_process_0_is",
        processes=2,
        devices=1,
        recoverable=True,
        restarts=[1],
    )
    kind, text = result.report
    assert kind == "PeerError" and "process 0 (not in this call; its last is" in text and ".save(1))" in text
    assert "this process was started again in its job" in text


def run_to_the_end(tmp_path: pathlib.Path, body: str) -> list[tuple[int, str]]:
    """Runs a recoverable job of two processes whose interpreters end. Returns exit codes and what was printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    prelude = f"""
import os, sys, time, jax, numpy as np
INDEX = int(sys.argv[1])
jax.config.update("jax_enable_recoverability", True)
jax.distributed.initialize({address!r}, 2, INDEX)
import treering as tr
tr.save({str(tmp_path / "a")!r}, {{"x": np.ones(3)}})
"""
    command = [sys.executable, "-W", "ignore", "-c", prelude + body]
    running = [
        subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for n in (0, 1)
    ]
    return [(process.wait(), output) for process in running for output in [process.communicate(timeout=60)[0]]]


@pytest.mark.slow
@pytest.mark.compat
def test_process_0_ends_after_its_living_peers(tmp_path: pathlib.Path) -> None:
    """JAX aborts a process of a recoverable job that outlives process 0. Launchers would start the job again."""
    for code, output in run_to_the_end(tmp_path, "time.sleep(2 * INDEX)"):
        assert code == 0, output


@pytest.mark.slow
def test_process_0_that_failed_does_not_wait_for_its_peers(tmp_path: pathlib.Path) -> None:
    """Its peers may wait for it in a collective of JAX, which ends only with process 0."""
    body = """
if INDEX == 0:
    print(os.getpid(), "fails", flush=True)
    raise ZeroDivisionError
while True:
    time.sleep(0.1)
"""
    (code, output), (other, _) = run_to_the_end(tmp_path, body)
    assert code == 1 and "ZeroDivisionError" in output and other != 0


@pytest.mark.slow
def test_job_that_was_shut_down_saves_nothing(tmp_path: pathlib.Path) -> None:
    """After `jax.distributed.shutdown()` there are still two processes, but no way to agree."""
    for result in run_job(tmp_path, "lives.job_that_was_shut_down_saves_nothing", processes=2, devices=1):
        first, second, alone = result.report
        assert first[0] == second[0] == "MismatchError" and alone
        assert "expected a job of 2 processes, found that jax.distributed.shutdown() has ended it" in first[1]
    assert not (tmp_path / "last").exists() and tr.restore(tmp_path / "own-1") == {"x": 1}
