"""The bodies of the jobs in tests/run/test_run.py."""

import time

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import treering as tr
from jobs.process import INDEX, caught, put, report, same, sync, tmp
from treering import stores
from treering._run.plain_run import PlainRun


def several_processes_decide_together() -> None:
    reports = []

    def tree(step):
        return {"w": put(np.full(8, step, np.float32), P("x")), "n": step}

    def again(options=None):
        return tr.Checkpointer(tmp / "run", timeout=20, **(options or {}))

    with again({"on_save": lambda report: reports.append(report.step), "keep": tr.keep.last(3)}) as ckpts:
        for step in range(1, 6):
            ckpts.save(step, tree(step))
        ckpts.wait()
        steps = ckpts.steps
        ckpts.rewind(4)
        sync("rewound")
        rewound = ckpts.steps
        template = {"w": jax.ShapeDtypeStruct((8,), np.float32, sharding=tree(0)["w"].sharding), "n": 0}
        ckpts.restore(template, step=3)
        assert same(ckpts.restore(template, step=3)["w"], np.full(8, 3, np.float32))
        ckpts.save(4, tree(44))
        ckpts.wait()
        branched = ckpts.steps
        assert ckpts.restore(template)["n"] == 44
    sync("closed")
    refused = None
    first = tr.Checkpointer(tmp / "run", timeout=20)
    second = tr.Checkpointer(tmp / "run", timeout=20)
    first.save(5, tree(5))
    first.wait()
    second.save(6, tree(6))
    second.wait()
    refused = caught(lambda: (first.save(7, tree(7)), first.wait()))
    second.finish()
    finished = [ckpt.step for ckpt in tr.follow(tmp / "run", timeout=0)]

    class Slow(stores.posix.Disk):
        def preallocate(self, fd, size):
            time.sleep(1.5 if INDEX else 0)
            super().preallocate(fd, size)

    stores.register(stores.Filesystem(Slow()))
    busy = tr.Checkpointer(tmp / "busy", when_busy="skip", timeout=20)
    taken = [busy.save(step, tree(step)) is not None for step in (1, 2)]
    busy.close()
    report([reports, steps, rewound, branched, refused, finished, taken, busy.steps])


def peers_wait_for_the_lease_in_the_first_save() -> None:
    acquire, waits = PlainRun.acquire, [0.0 if INDEX else 12.0]

    def slow(self):
        time.sleep(waits.pop() if waits else 0)
        acquire(self)

    PlainRun.acquire = slow
    ckpts = tr.Checkpointer(tmp / "run", timeout=2)
    for step in (1, 2):
        ckpts.save(step, {"w": put(np.full(8, step, np.float32), P("x"))})
    ckpts.close()
    report(ckpts.steps)
