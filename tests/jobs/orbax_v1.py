"""The bodies of the jobs in tests/orbax/test_v1.py."""

import numpy as np
from jax.sharding import PartitionSpec as P

from jobs.process import INDEX, caught, put, report, same, tmp


def several_processes() -> None:
    from treering.orbax import v1 as ocp

    value = np.arange(8, dtype=np.float32)

    def state(k):
        return {"w": put(value * k, P("x")), "n": k}

    ocp.save(tmp / "one", state(2))
    one = ocp.load(tmp / "one", state(0))
    keep = ocp.training.preservation_policies.LatestN(2)
    with ocp.training.Checkpointer(tmp / "run", preservation_policy=keep, custom_metadata={"a": 1}) as ckpts:
        took = [ckpts.save(step, state(step), metrics={"loss": step}) for step in range(4)]
        ckpts.save(3, state(7), overwrite=True)
        response = ckpts.save_async(4, state(4))
        newest = ckpts.latest.step
        response.result()
        found = ckpts.load(None, state(0))
        steps = [ckpt.step for ckpt in ckpts.checkpoints]
        report(
            [
                took,
                newest,
                steps,
                same(one["w"], value * 2),
                same(found["w"], value * 4),
                found["n"],
                same(ckpts.load(3, state(0))["w"], value * 7),
                ckpts.root_metadata().custom_metadata,
            ]
        )


def all_processes_use_one_step() -> None:
    from treering._run.plain_run import PlainRun
    from treering._run.step_catalog import StepCatalog
    from treering.orbax import v1 as ocp

    value = np.arange(8, dtype=np.float32)

    def state(k):
        return {"w": put(value * k, P("x"))}

    ckpts = ocp.training.Checkpointer(tmp / "run")
    for step in (1, 2):
        ckpts.save(step, state(step))
    if INDEX:
        valid, located = StepCatalog.valid_steps, PlainRun.located_steps
        StepCatalog.valid_steps = lambda *args, **options: [one for one in valid(*args, **options) if one.step != 2]
        PlainRun.located_steps = lambda *args: {step: one for step, one in located(*args).items() if step != 2}
    ckpts.reload()
    known = [one.step for one in ckpts.checkpoints]
    loads = [same(ckpts.load(step, state(0))["w"], value * 2) for step in (None, 2)]
    loads.append(same(ckpts.load_checkpointables(None, {"state": state(0)})["state"]["w"], value * 2))
    missing = caught(ckpts.load, 3)[0]
    exists = caught(ckpts.save, 2, state(3))[0]
    saved = [ckpts.save(2, state(3), overwrite=True), same(ckpts.load(2, state(0))["w"], value * 3)]
    deleted = [ckpts.delete(step, missing_ok=True) for step in (2, 3)]
    report([known, loads, missing, exists, saved, deleted])


def a_broadcast_keeps_every_bit() -> None:
    import jax
    import jax.numpy as jnp

    from treering.orbax import multihost

    nan = np.uint32(0x7FC00123).view(np.float32)
    sent = [2**40 + 5, np.uint64(2**63 + 7), 0.1, np.array([-0.0, nan, 1e-40], np.float32), np.zeros((0, 3))]
    sent += [np.array([[True, False]]).T, jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), np.array([-8, 7], jnp.int4)]
    found = multihost.broadcast_one_to_all(sent if INDEX == 0 else jax.tree.map(np.zeros_like, sent))
    wanted = [np.asarray(leaf) for leaf in sent]
    assert [leaf.dtype for leaf in found] == [leaf.dtype for leaf in wanted], found
    assert [leaf.shape for leaf in found] == [leaf.shape for leaf in wanted], found
    assert [leaf.tobytes() for leaf in found] == [leaf.tobytes() for leaf in wanted], found
    assert multihost.broadcast_one_to_all({"step": INDEX}, is_source=INDEX == 1) == {"step": 1}
    report([caught(multihost.broadcast_one_to_all, one) for one in ("text", 2**70)])
