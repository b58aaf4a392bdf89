"""The caller's turn with the writers, where the memory of the host has no room for more copies."""

import threading

import jax
import numpy as np
import pytest

from treering._pytree import staging
from treering._pytree.leaves import LocalShard
from treering._pytree.staging import Staging

_SIZE = 1000


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3]], ids=["in turn", "another", "some"])
def test_all_is_staged_where_there_is_never_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, order: list[int]
) -> None:
    """One portion after the other; in another order writers would wait for what comes later, so all of it is taken."""
    monkeypatch.setattr(staging, "_PORTION_BYTES", _SIZE // jax.local_device_count())
    arrays = [np.full(_SIZE, n, np.uint8) for n in range(4)]
    shards = [LocalShard(n, ((0, _SIZE),), array.dtype, _SIZE, True) for n, array in enumerate(arrays)]
    supply = Staging(shards, list(arrays), None, lambda nbytes: False)
    caller = threading.Thread(target=supply.run, daemon=True)
    caller.start()
    supply.writers_needed.wait()
    assert "an eighth of the memory" in caplog.text
    supply.need(order, [_SIZE] * len(order))
    found: dict[int, bytes] = {}

    def write() -> None:
        for n in order:
            (part,) = supply.take([n])
            found[n] = part.tobytes()
            supply.copied([n], [_SIZE])

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    for one in (writer, caller):
        one.join(20)
        assert not one.is_alive()
    assert found == {n: arrays[n].tobytes() for n in order}
