"""The bodies of the jobs in tests/formats/test_orbax_iterators.py."""

import numpy as np
from jax.sharding import PartitionSpec as P

import treering as tr
from jobs.process import COUNT, INDEX, caught, put, report, sync, tmp


def each_process_takes_its_own() -> None:
    import grain
    import grain.checkpoint
    import orbax.checkpoint as ocp

    def make():
        return iter(grain.MapDataset.range(1000)[INDEX::COUNT].shuffle(seed=2).to_iter_dataset())

    data = make()
    for _ in range(3 + 2 * INDEX):
        next(data)
    state = {"w": put(np.arange(8.0), P("x"))}
    with ocp.CheckpointManager(tmp / "run") as run:
        run.save(
            2, args=ocp.args.Composite(state=ocp.args.StandardSave(state), data=grain.checkpoint.CheckpointSave(data))
        )
    expected = [int(next(data)) for _ in range(4)]
    sync("saved")
    other = make()
    tr.restore(tmp / "run", like={"state": state, "data": other})
    assert [int(next(other)) for _ in range(4)] == expected
    report(expected)


def processes_write_their_states_as_grain_does() -> None:
    import grain
    import grain.checkpoint
    import orbax.checkpoint as ocp

    def make():
        return iter(grain.MapDataset.range(1000)[INDEX::COUNT].shuffle(seed=2).to_iter_dataset())

    def elastic():
        options = grain.sharding.ShardOptions(shard_index=INDEX, shard_count=COUNT)
        return iter(grain.experimental.ElasticIterator(grain.MapDataset.range(1000), 8, options))

    data, shared = make(), elastic()
    for _ in range(3 + 2 * INDEX):
        next(data)
    next(shared)
    state = {"w": put(np.arange(8.0), P("x"))}

    class Large:
        __module__ = "grain.own"

        def get_state(self):
            return ["x" * (3 << 20)]

        def set_state(self, state):
            pass

    tr.save(tmp / "c", {"state": state, "data": data, "shared": shared}, format="orbax", composite=True, timeout=20)
    problem = caught(tr.save, tmp / "d", {"state": state, "x": Large()}, format="orbax", composite=True, timeout=20)
    expected = [int(next(data)) for _ in range(4)]
    sync("saved")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        args = ocp.args.Composite(
            data=grain.checkpoint.CheckpointRestore(other := make()),
            shared=grain.checkpoint.CheckpointRestore(again := elastic()),
        )
        reader.restore(tmp / "c", args)
    assert [int(next(other)) for _ in range(4)] == expected
    assert (next(again) == next(shared)).all()
    report(problem)
