"""Tests how the caller and the writers take turns if the host's memory has no room for more copies."""

import pathlib
import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

import treering as tr
from treering._pytree import staged_supply
from treering._pytree.leaves import LocalShard
from treering._pytree.staged_supply import StagedSupply

pytestmark = pytest.mark.compat

_SIZE = 1000


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3]], ids=["in turn", "another", "some"])
def test_all_is_staged_where_there_is_never_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, order: list[int]
) -> None:
    """Portions follow each other. In another order everything is staged, as writers may need any shard."""
    monkeypatch.setattr(staged_supply, "_MAX_COPY_BYTES_PER_DEVICE", _SIZE // jax.local_device_count())
    arrays = [np.full(_SIZE, n, np.uint8) for n in range(4)]
    shards = [LocalShard(n, ((0, _SIZE),), array.dtype, _SIZE, True) for n, array in enumerate(arrays)]
    supply = StagedSupply(shards, list(arrays), None, lambda nbytes: False)
    caller = threading.Thread(target=supply.run, daemon=True)
    caller.start()
    supply.writers_needed.wait()
    assert "leave an eighth of all memory free" in caplog.text
    supply.plan_reads(order, [_SIZE] * len(order))
    found: dict[int, bytes] = {}

    def write() -> None:
        for n in order:
            (part,) = supply.take([n])
            found[n] = part.tobytes()
            supply.release_bytes([n], [_SIZE])

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    for one in (writer, caller):
        one.join(20)
        assert not one.is_alive()
    assert found == {n: arrays[n].tobytes() for n in order}


def test_the_plan_comes_while_deferred_shards_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of shards that the plan leaves out is free for the next ones, even if the plan came late."""
    monkeypatch.setattr(staged_supply, "_COPIED_BYTES_PER_SECOND", 1e12)
    arrays = [np.full(_SIZE, n, np.uint8) for n in range(4)]
    shards = [LocalShard(n, ((0, _SIZE),), array.dtype, _SIZE, True) for n, array in enumerate(arrays)]
    supply = StagedSupply(shards, list(arrays), _SIZE, deferred=4)
    copy = staged_supply.host_bytes

    def planned_meanwhile(shard: LocalShard, *arguments: Any) -> np.ndarray:
        if shard.leaf == 0:
            supply.plan_reads([2, 3], [_SIZE] * 2)
        return copy(shard, *arguments)

    monkeypatch.setattr(staged_supply, "host_bytes", planned_meanwhile)
    caller = threading.Thread(target=supply.run, daemon=True)
    caller.start()
    for n in (2, 3):
        writer = threading.Thread(target=supply.take, args=([n],), daemon=True)
        writer.start()
        writer.join(5)
        assert not writer.is_alive()
        supply.release_bytes([n], [_SIZE])
    caller.join(5)
    assert not caller.is_alive()


@pytest.mark.long
def test_memory_that_python_has_no_view_of(tmp_path: pathlib.Path) -> None:
    """Stages arrays that are not in C order, have dtypes that only NumPy knows, or have no elements."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    turned = Format(Layout(major_to_minor=(1, 0)), device)
    plain = np.arange(12, dtype=np.float32).reshape(3, 4)
    tree = {
        "turned": jax.device_put(plain, turned),
        "plain": jax.device_put(plain),
        "half": jax.device_put(plain).astype("bfloat16"),
        "none": jax.numpy.zeros((0, 4)),
        "one": jax.numpy.float32(3),
    }
    for chosen in (["turned", "plain"], ["plain", "none", "one"], list(tree)):
        some = {name: tree[name] for name in chosen}
        for step in range(2):  # a structure that is remembered from the last time takes another path in the code
            tr.save(tmp_path / f"{len(chosen)}-{step}", some)
            found = tr.restore(tmp_path / f"{len(chosen)}-{step}")
            assert all(found[name].tobytes() == np.asarray(some[name]).tobytes() for name in chosen)
