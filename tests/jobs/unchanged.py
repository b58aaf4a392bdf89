"""The bodies of the jobs in tests/run/test_unchanged.py."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import accelerator
import treering as tr
from jobs.process import DEVICES, devices, put, report, same, tmp


def job() -> None:
    run = tmp / "run"
    frozen, held = put(np.arange(1 << 20, dtype=np.float32), P("x")), put(np.ones(600_000, np.float32))
    like = {
        "frozen": frozen,
        "held": held,
        "equal": held,
        "trained": put(np.zeros(600_000, np.float32), P("x")),
        "n": 0,
    }
    shared = []
    with tr.Checkpointer(run, keep=tr.keep.last(3)) as ckpts:
        for step in range(1, 10):
            if step == 8:
                held = put(np.full(600_000, 2, np.float32))
            trained = put(np.full(600_000, step, np.float32), P("x"))
            equal = put(np.arange(2_000_000, dtype=np.float32), P())
            tree = {"frozen": frozen, "held": held, "equal": equal, "trained": trained, "n": step}
            pending = ckpts.save(step, tree)
            shared.append(pending.result().shared_bytes)
    like = {**like, "equal": put(np.zeros(2_000_000, np.float32))}
    found = {step: tr.restore(run, like, step=step) for step in (7, 8, 9)}
    right = all(
        same(one["frozen"], np.arange(1 << 20, dtype=np.float32))
        and same(one["held"], np.full(600_000, 1 + (step > 7), np.float32))
        and same(one["equal"], np.arange(2_000_000, dtype=np.float32))
        and same(one["trained"], np.full(600_000, step, np.float32))
        and one["n"] == step
        for step, one in found.items()
    )
    # Only process 1 has an array that does not change; process 0 knows nothing of it. The path is not valid Unicode.
    run, theirs = tmp / "theirs\udcff", Mesh(devices[DEVICES:], ("x",))
    mine, known = put(np.arange(600_000, dtype=np.float32), mesh=theirs), 0
    with tr.Checkpointer(run) as ckpts:
        for step in range(1, 8):
            tree = {"mine": mine, "trained": put(np.full(600_000, step, np.float32))}
            nbytes = ckpts.save(step, tree).result().shared_bytes
        known = len(ckpts._saver._unchanged.state.ledger.usable(None))
        right &= same(ckpts.restore(tree)["trained"], np.full(600_000, 7, np.float32))
    tr.save(tmp / "one\udcff", tree)
    right &= same(tr.restore(tmp / "one\udcff", tree)["mine"], np.arange(600_000, dtype=np.float32))
    report([shared, right, nbytes, known])


def job_with_accelerators() -> None:
    accelerator.install(pytest.MonkeyPatch())
    tree = {"everywhere": jnp.arange(600_000.0), "global": put(np.arange(600_000, dtype=np.float32), P("x"))}
    with tr.Checkpointer(tmp / "run") as ckpts:
        for step in range(1, 9):
            made = put(np.arange(700_000, dtype=np.float32), P("x"))
            pending = ckpts.save(step, {**tree, "made": made, "n": step})
            nbytes, supply = pending.result().shared_bytes, pending._supply
    report([sorted({shard.leaf for shard in supply.shards[supply._first_deferred :]}), nbytes])
