"""The bodies of the jobs in tests/processes/test_fates.py."""

import os
import signal
import time
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

import treering as tr
from jobs.process import INDEX, caught, put, report, tmp
from treering import stores


def body(CALL: Any, FATE: Any) -> None:
    def act(call):
        match FATE:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "ended":
                raise SystemExit
            case "late":
                time.sleep(5)

    armed = []

    class Armed(stores.posix.Disk):
        def sync(self, fd):
            if armed == ["save"] and "arrays-" in os.readlink(f"/proc/self/fd/{fd}"):
                act(armed.pop())
            super().sync(fd)

        def open(self, path):
            if armed == ["restore"] and "arrays-" in path:
                act(armed.pop())
            return super().open(path)

    if INDEX == 2:
        stores.register(stores.Filesystem(Armed()))
    state = {"x": put(np.arange(3 << 19, dtype=np.float32), P("x")), "n": 1}
    local = {"local": tmp / "local"} if CALL == "close" else {}
    ckpts = tr.Checkpointer(tmp / "run", timeout=3, **local)
    ckpts.save(1, state).result()
    calls = {
        "save": lambda: ckpts.save(2, state).result(),
        "restore": lambda: ckpts.restore(state, read="once"),
        "close": ckpts.close,
        "between": lambda: ckpts.save(2, state).result(),
    }
    if INDEX == 2:
        (tmp / "victim").write_text(str(os.getpid()))
        if CALL in ("save", "restore"):
            armed.append(CALL)
        else:
            act(CALL)
    error = caught(calls[CALL])
    if FATE == "stopped" and INDEX == 0:
        os.kill(int((tmp / "victim").read_text()), signal.SIGCONT)
    met = None
    if FATE in ("stopped", "late"):
        later = tr.Checkpointer(tmp / "run", timeout=3)
        for _ in range(4):  # A process that stood still fails the calls that its peers have cancelled.
            met = caught(lambda: later.save(9, state, on_exists="overwrite").result())
            if met is None:
                break
    report([error, met, tr.steps(tmp / "run")])
