"""The bodies of the jobs in tests/processes/test_lives.py."""

import os
import signal
import time

import jax

import treering as tr
from jobs.process import INDEX, LIFE, caught, report, tmp
from treering.errors import PeerError


def restarted_process_is_preempted_with_its_peers() -> None:
    while True:
        try:
            with tr.Checkpointer(tmp / "run", save_every=10, timeout=6, save_on_preemption=True) as ckpts:
                first = ckpts.restore_or_init(lambda: {"n": 0})[1] + 1
                for step in range(first, 400):
                    time.sleep(2 if INDEX == 0 and step == 22 and LIFE == 1 else 0.02)
                    ckpts.save(step, {"n": step})
                    if INDEX == 1 and LIFE == 1 and step == 21:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if INDEX == 1 and LIFE == 2 and step == 40:
                        os.kill(os.getpid(), signal.SIGTERM)
                    if ckpts.preempted:
                        break
            break
        except PeerError:
            pass
    report([step, tr.steps(tmp / "run")[-1]])


def restarted_process_learns_where_process_0_is() -> None:
    ckpts = tr.Checkpointer(tmp / "run", timeout=2)
    if LIFE == 1:
        ckpts.restore_or_init(lambda: {"n": 0})
        ckpts.save(1, {"n": 1}).result()
        if INDEX == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(8)
    else:
        report(caught(lambda: ckpts.restore_or_init(lambda: {"n": 0})))


def job_that_was_shut_down_saves_nothing() -> None:
    jax.process_count()
    jax.distributed.shutdown()
    mine = str(tmp / f"own-{INDEX}")
    calls = [lambda: tr.save(tmp / "last", {"x": 1}), lambda: tr.Checkpointer(tmp / "run").save(1, {"x": 1})]
    report([*map(caught, calls), tr.save(mine, {"x": INDEX}, processes="this") is not None])
    os._exit(0)
