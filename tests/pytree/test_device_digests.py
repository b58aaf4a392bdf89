"""Digests that accelerators make of arrays. CPU devices stand for them; see `accelerator`."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import accelerator
from treering._pytree import device_digests
from treering._pytree.device_digests import DeviceDigests
from treering._pytree.leaves import describe_leaves

pytestmark = pytest.mark.compat


@pytest.fixture(autouse=True)
def _accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator.install(monkeypatch)


def _digests(*arrays: Any) -> dict[int, Any]:
    described = describe_leaves([str(n) for n in range(len(arrays))], arrays)
    digests, wanted = DeviceDigests(), range(len(arrays))
    assert not digests.of(wanted, described.shards, described.data), "nothing is compiled while the caller waits"
    while digests._missing:
        digests.compile()
    return digests.of(wanted, described.shards, described.data)


def test_a_save_compiles_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the save of a tree of many shapes would keep the next one waiting for the compiler."""
    monkeypatch.setattr(device_digests, "_COMPILE_SECONDS", 0.0)
    described = describe_leaves(["a", "b"], [jnp.ones(8), jnp.ones(9)])
    digests, counts = DeviceDigests(), list[int]()
    for _ in range(3):
        counts.append(len(digests.of(range(2), described.shards, described.data)))
        digests.compile()
    assert counts == [0, 1, 2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "int8", "uint16", "float64", "bool"])
def test_every_bit_in_every_place_counts(dtype: str) -> None:
    """Denormal numbers, signs of zero and payloads of NaN count too. The four words of a digest differ alike."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    with jax.enable_x64(True):
        base = np.zeros((3, 1, 5), kind)
        bits = np.unpackbits(base.reshape(-1).view(np.uint8))
        changed = [bits]
        for n in range(0, len(bits), 1 if dtype != "bool" else 8):
            changed.append(bits.copy())
            changed[-1][n + 7 if dtype == "bool" else n] ^= 1
        values = [jnp.asarray(np.packbits(one).view(kind).reshape(base.shape)) for one in changed]
        found = _digests(*values)
    words = np.array([np.frombuffer(own, np.uint32) for _, _, own in found.values()])
    assert words.shape == (len(changed), 4)
    assert all(len(set(words[:, n])) == len(changed) for n in range(4))


def test_order_shape_and_dtype_count() -> None:
    values = np.random.default_rng(0).normal(size=(6, 7)).astype(np.float32)
    rows, exchanged = values[[1, 0, 2, 3, 4, 5]], values.copy()
    exchanged[2, 3], exchanged[4, 1] = values[4, 1], values[2, 3]
    others = [rows, exchanged, values[:, ::-1], values.T, values.reshape(7, 6), values.view(np.int32)]
    found = _digests(*map(jnp.asarray, (values, *others)))
    assert len(set(found.values())) == 7
    again = _digests(jnp.asarray(values), jnp.asarray(values) + 0)
    assert again[0] == again[1] == found[0]


def test_two_signs_change() -> None:
    """The position hashes of these elements differ in one bit, the sign's. Their keys must not do so in each sum."""
    values = np.zeros(85_609, np.float32)
    changed = values.copy()
    changed[[81_226, 85_608]] = -0.0
    found = _digests(jnp.asarray(values), jnp.asarray(changed))
    assert found[0] != found[1]


def test_the_modes_of_jax_do_not_matter() -> None:
    """The thread of a save may compile in other modes than those in which the arrays were made."""
    with jax.enable_x64(True):
        wide = jnp.arange(8, dtype=jnp.float64)
    with jax.disable_jit():
        found = _digests(wide, jnp.arange(8))
    assert len(found) == 2


def test_each_part_of_a_sharded_array_has_its_own() -> None:
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    values = np.arange(64, dtype=np.int32)
    found = _digests(*(jax.device_put(one, sharding) for one in (values, np.append(values[:-1], 0), values[::-1])))
    words = [[own[16 * n : 16 * n + 16] for n in range(4)] for _, _, own in found.values()]
    assert found[0][1] == tuple(((16 * n, 16 * n + 16),) for n in range(4))
    assert words[0][:3] == words[1][:3] and words[0][3] != words[1][3] and not {*words[0]} & {*words[2]}


def test_arrays_without_digests() -> None:
    """They are copied from the device, as if they had changed: JAX cannot take the bits of complex numbers."""
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    some = [jnp.ones(8, jnp.complex64), jnp.ones(8, jnp.int4), jnp.ones((0, 3)), jax.device_put(np.ones(8), pinned)]
    found = _digests(*some, np.ones(8), jnp.ones(8))
    assert list(found) == [len(some) + 1]
