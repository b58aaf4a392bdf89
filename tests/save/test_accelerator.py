"""Tests the host memory of saves from an accelerator, with a double of one: see `accelerator`."""

import logging
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import accelerator
import treering as tr
from treering._core import host_memory
from treering._pytree import devices
from treering._restore import array_placement
from treering.testing._doubles import HeldDisk

pytestmark = pytest.mark.compat

MIB = 1 << 20


def state(leaves: int, mib: int = 1) -> dict[str, Any]:
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    spread = NamedSharding(mesh, PartitionSpec("x"))
    values = [np.full((mib << 18,), n, np.float32) for n in range(leaves)]
    return {f"w{n}": jax.device_put(value, spread if n % 2 else jax.devices()[0]) for n, value in enumerate(values)}


def assert_saved(path: pathlib.Path, saved: dict[str, Any]) -> None:
    for name, value in tr.restore(path).items():
        assert value.tobytes() == np.asarray(saved[name]).tobytes()


def like(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def cached(array: Any) -> bool:
    """Returns True if JAX keeps a copy of an array on the host for as long as the array lives."""
    return any(part._npy_value is not None for part in [array, *(shard.data for shard in array.addressable_shards)])


@pytest.mark.long
@pytest.mark.parametrize("rules", [(), (tr.rules.cast("w0", "float16"),)])
def test_no_more_is_copied_than_the_host_has_room_for(
    tmp_path: pathlib.Path, use_disk: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rules: Any
) -> None:
    """A save without a memory limit holds at most a quarter of the available memory in copies."""
    double = accelerator.install(monkeypatch)
    monkeypatch.setattr(host_memory, "_MIN_LIMIT_BYTES", MIB)
    monkeypatch.setattr(host_memory, "available", lambda: 32 * MIB)
    disk = use_disk(HeldDisk())
    saved = state(32)
    returned = threading.Event()
    pending: list[Any] = []

    def save() -> None:
        pending.append(tr.save_async(tmp_path / "c", saved, rules=rules))
        returned.set()

    thread = threading.Thread(target=save)
    with caplog.at_level(logging.INFO, "treering"):
        thread.start()
        assert not returned.wait(1), "32 MiB are held where 8 are allowed"
    assert double.nbytes <= 8 * MIB
    assert "memory_limit= sets another limit" in caplog.text
    disk.go.set()
    thread.join()
    pending[0].result()
    if not rules:
        assert_saved(tmp_path / "c", saved)
    double.requests.clear()
    tr.save_async(tmp_path / "all", saved, memory_limit=64 * MIB).result()
    assert double.requests == [32 * MIB], "what fits is begun at once"


@pytest.mark.parametrize("refuses", ["at once", "later"])
def test_pageable_memory_is_taken_where_pinned_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refuses: str
) -> None:
    """A save copies to pageable memory if the device refuses pinned memory."""
    double = accelerator.install(monkeypatch, refuses)
    saved = state(6)
    with caplog.at_level(logging.WARNING, "treering"):
        tr.save_async(tmp_path / "c", saved).result()
    assert double.requests and caplog.text.count("pageable memory is used: RESOURCE_EXHAUSTED") == 1
    assert not any(map(cached, saved.values()))
    assert_saved(tmp_path / "c", saved)


def test_no_copy_on_the_host_stays_with_the_arrays_of_the_caller(tmp_path: pathlib.Path) -> None:
    """After a save, JAX keeps no host copy of the caller's arrays.

    This needs no double: JAX unpacks 4-bit arrays of CPUs on the host too, and caches the unpacked array.
    """
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    values = np.arange(-8, 8).astype(ml_dtypes.int4)
    saved = {
        "one": jax.device_put(values),
        "spread": jax.device_put(values, NamedSharding(mesh, PartitionSpec("x"))),
        "replicated": jax.device_put(values, NamedSharding(mesh, PartitionSpec())),
    }
    tr.save(tmp_path / "a", saved)
    tr.save_async(tmp_path / "b", saved, rules=[tr.rules.rename("one", "single")]).result()
    tr.save(tmp_path / "c", saved, rules=[tr.rules.rename("one", "single")], memory_limit=4)
    assert not any(map(cached, saved.values()))
    np.asarray(saved["one"])
    assert cached(saved["one"]), "or this test looks in the wrong place"


def test_what_lies_in_host_memory_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays in host memory are not copied. The devices are mocks of another platform; only their names are read."""

    class Device:
        platform, id, process_index, device_kind = "gpu", 0, 0, "mock"

    mesh = Mesh(np.array([Device()]), ("x",))
    kinds = {"pinned_host": True, "unpinned_host": True, "device": False}
    for kind, expected in kinds.items():

        class Sharding:
            memory_kind, device_set = kind, set(mesh.devices.flat)

        assert devices.on_host(Sharding()) is expected  # type: ignore[arg-type]


def test_pinned_arrays_are_saved_as_they_are_and_restored_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays in pinned host memory are saved without a copy, and restored into pinned host memory."""
    where = jax.sharding.SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host")
    values = np.arange(4096.0, dtype=np.float32)
    saved = {"w": jax.device_put(values, where)}
    with monkeypatch.context() as patch:
        double = accelerator.install(patch)
        tr.save_async(tmp_path / "a", {**saved, "on the device": jax.device_put(values[:7], jax.devices()[1])}).result()
        assert double.nbytes == 7 * 4, "only what lies on the device is copied"
        tr.save_async(tmp_path / "a", saved, overwrite=True).result()
        assert double.nbytes == 7 * 4
    found = tr.restore(tmp_path / "a", saved)
    assert found["w"].sharding == where and found["w"].sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(np.asarray(found["w"]), np.asarray(saved["w"]))


def test_the_next_group_is_read_while_one_goes_to_the_device(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore reads the next group of leaves while it moves one to the device."""
    saved = state(8)
    tr.save(tmp_path / "c", saved)
    accelerator.install(monkeypatch)
    from treering.formats.treering.read import Reader

    read, put = Reader.read, array_placement.put_arrays
    begun: list[int] = []  # the number of leaves of each group whose reading has begun
    more = threading.Semaphore(0)
    over: list[int] = []

    def reading(self: Reader, wanted: Any, **options: Any) -> Any:
        begun.append(len(wanted))
        more.release()
        return read(self, wanted, **options)

    def putting(items: Any) -> Any:
        if not over:
            assert more.acquire(timeout=20)  # the first group, which was read already
        if len(over) < 3:
            assert more.acquire(timeout=20), "nothing is read meanwhile"
        assert len(begun) <= len(over) + 2, "more than two groups are in memory"
        made = put(items)
        over.append(len(items))
        return made

    monkeypatch.setattr(Reader, "read", reading)
    monkeypatch.setattr(array_placement, "put_arrays", putting)
    found = tr.restore(tmp_path / "c", {name: like(value) for name, value in saved.items()}, memory_limit=4 * MIB)
    assert over == [2, 2, 2, 2]  # Each group has half of the memory limit.
    for name, value in found.items():
        assert np.asarray(value).tobytes() == np.asarray(saved[name]).tobytes()


@pytest.mark.rare
@pytest.mark.slow
def test_a_thousand_saves_take_no_more_memory_than_a_hundred(tmp_path: pathlib.Path) -> None:
    """A save frees its memory. This uses pinned memory of the CPU backend, in a process of its own."""
    code = """
        import gc, pathlib, shutil, sys
        import jax, numpy as np, pytest
        sys.path.insert(0, sys.argv[2])
        import accelerator
        import treering as tr
        from treering import stores
        from treering.testing._doubles import QuickDisk
        accelerator.install(pytest.MonkeyPatch())
        stores.register(stores.Filesystem(QuickDisk()))
        step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
        state = {f"w{n}": jax.numpy.full((1 << 16,), n, "float32") for n in range(16)}
        def resident():
            gc.collect()
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096
        samples = []
        with tr.Checkpointer(sys.argv[1], keep=tr.keep.last(2)) as ckpts:
            for n in range(1, 1001):
                ckpts.save(n, state)
                state = step(state)
                if n % 100 == 0:
                    ckpts.wait()
                    samples.append(resident())
        restored = tr.restore(sys.argv[1])
        assert (restored["w3"] == 3 + 999).all()
        slope = np.polyfit(np.arange(len(samples[1:])) * 100, samples[1:], 1)[0]
        print(slope / 2**20)
    """
    tests = str(pathlib.Path(__file__).parents[1])
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "run"), tests]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) <= 0.1, f"MiB a save: {done.stdout}"
