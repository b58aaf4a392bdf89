"""The bodies of the jobs in tests/pytree/test_iterators.py."""

import numpy as np
from jax.sharding import PartitionSpec as P

import treering as tr
from jobs.process import COUNT, INDEX, caught, put, report, tmp


def the_large_states_of_several_processes() -> None:
    class Large:
        def __init__(self, state=None):
            self.state = state

        def get_state(self):
            return self.state

        def set_state(self, state):
            self.state = state

    def tree():
        sizes = {"all": 3 << 20, "one": 0 if INDEX else 3 << 20, "none": 0}
        return {name: Large([INDEX, bytes([INDEX]) * size]) for name, size in sizes.items()}

    w = put(np.ones((4, 2), np.float32), P("x"))
    tr.save(tmp / "c", {**tree(), "w": w}, timeout=20)
    tr.save_async(tmp / "rules", {**tree(), "w": w}, rules=[tr.rules.cast("w", "bfloat16")]).result()
    tr.save(tmp / "made", {**tree(), "w": w}, rules=[tr.rules.transpose("w", (1, 0))])
    tr.save(tmp / "again", tr.open(tmp / "c"))
    for name in ("c", "rules", "made", "again"):
        like = {name: Large() for name in tree()}
        found = tr.restore(tmp / name, like={**like, "w": ...})
        assert {n: found[n].state for n in like} == {n: one.state for n, one in tree().items()}, name
    report(None)


def every_process_has_its_own_state() -> None:
    import grain

    def make():
        shard = grain.MapDataset.range(1000)[INDEX::COUNT].shuffle(seed=2)
        return iter(shard.to_iter_dataset())

    def elastic():
        options = grain.sharding.ShardOptions(shard_index=INDEX, shard_count=COUNT)
        return iter(grain.experimental.ElasticIterator(grain.MapDataset.range(1000), 8, options))

    def mixed():
        return iter(
            grain.experimental.LimitIterDataset(grain.IterDataset.mix([iterable(), iterable()], [0.7, 0.3]), 30)
        )

    def zipped(other):
        return iter(grain.experimental.ZipIterDataset([iterable(), other]))

    def iterable():
        options = grain.sharding.ShardOptions(shard_index=INDEX, shard_count=COUNT)
        return grain.experimental.ElasticIterator(grain.MapDataset.range(1000), 8, options)

    data, shared, mix, zip = make(), elastic(), mixed(), zipped(iterable())
    partly = zipped(grain.MapDataset.range(9).to_iter_dataset())
    for _ in range(3 + 2 * INDEX):
        next(data)
    for _ in range(5):
        next(shared), next(mix), next(zip), next(partly)
    tree = {"data": data, "shared": shared, "mix": mix, "zip": zip, "partly": partly, "w": put(np.arange(8.0), P("x"))}
    tr.save(tmp / "c", tree, timeout=20)
    expected = [int(next(data)) for _ in range(4)]
    other, again = make(), elastic()
    tr.restore(tmp / "c", like={**tree, "data": other, "shared": again})
    assert [int(next(other)) for _ in range(4)] == expected
    assert (next(again) == next(shared)).all()
    next(shared)
    problem = caught(tr.save, tmp / "d", {"shared": shared if INDEX else elastic()}, timeout=20)
    report([expected, problem])
