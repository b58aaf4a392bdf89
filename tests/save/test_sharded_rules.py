"""Tests rules on arrays that are spread over devices, in pieces larger than one read."""

import pathlib

import jax
import numpy as np
import pytest

import treering as tr


@pytest.mark.long
def test_large_pieces_of_several_devices_are_cast(tmp_path: pathlib.Path) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    value = (np.arange(4 * 5_000_000) % 1000).astype(np.float32).reshape(4, -1)
    tr.save(tmp_path / "c", {"a": jax.device_put(value, sharding)}, dtype="float16", memory_limit=8 << 20)
    np.testing.assert_array_equal(tr.restore(tmp_path / "c")["a"], value.astype(np.float16))
    assert tr.verify(tmp_path / "c").ok
