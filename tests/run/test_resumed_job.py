"""Tests that a resumed job is the interrupted job: its state, its next five steps, and what JAX compiles for them."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import resumed_jobs
from resumed_jobs import Record, contents, describe, differences


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("group", resumed_jobs.groups())
def test_a_resumed_job_is_the_interrupted_job(tmp_path: pathlib.Path, group: str) -> None:
    problems = resumed_jobs.problems(group, tmp_path)
    if problems:
        pytest.fail(f"{len(problems)} differences:\n" + "\n".join(problems), pytrace=False)


ROWS = P("a")


def on_mesh(
    spec: P = ROWS, kind: AxisType = AxisType.Auto, order: int = 1, name: str = "a", devices: int = 8, **options: Any
) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:devices])[::order], (name,), axis_types=(kind,))
    return jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, spec, **options))


def on_device(device: int = 0, **options: Any) -> jax.Array:
    return jax.device_put(np.ones((2, 3), np.float32), SingleDeviceSharding(jax.devices()[device], **options))


def laid_out(*order: int) -> jax.Array:
    return jax.device_put(np.ones((2, 3), np.float32), Format(Layout(order), SingleDeviceSharding(jax.devices()[0])))


def shared(count: int) -> list[jax.Array]:
    arrays = [jnp.ones(3) for _ in range(count)]
    return [arrays[0], arrays[-1]]


def nan(bits: int) -> jax.Array:
    return jnp.asarray(np.array([bits], np.uint32).view(np.float32))


# Each case names a difference, and makes two trees that differ only in that.
PAIRS: dict[str, tuple[str, Callable[[], Any], Callable[[], Any]]] = {
    "weak type": ("weak type: ", lambda: jnp.float32(1), lambda: jnp.asarray(1.0)),
    "dtype": ("dtype: ", lambda: jnp.zeros(2, jnp.float16), lambda: jnp.zeros(2, jnp.bfloat16)),
    "shape": ("shape: ", lambda: jnp.zeros((0, 3)), lambda: jnp.zeros((0, 2))),
    "sign of zero": ("other bits", lambda: jnp.zeros(2), lambda: -jnp.zeros(2)),
    "kind of NaN": ("other bits", lambda: nan(0x7FC00001), lambda: nan(0x7FC00002)),
    "committedness": ("committed: ", lambda: jnp.ones((2, 3)), on_device),
    "device": ("devices: ", on_device, lambda: on_device(3)),
    "memory kind": ("memory kind: ", on_device, lambda: on_device(memory_kind="pinned_host")),
    "layout": ("layout: ", lambda: laid_out(0, 1), lambda: laid_out(1, 0)),
    "spec": ("spec: ", on_mesh, lambda: on_mesh(P("a", None))),
    "names of the mesh": ("mesh: ", lambda: on_mesh(P()), lambda: on_mesh(P(), name="b")),
    "size of the mesh": ("mesh: ", on_mesh, lambda: on_mesh(devices=4)),
    "axis types": ("mesh: ", on_mesh, lambda: on_mesh(kind=AxisType.Explicit)),
    "order of the devices": ("devices: ", on_mesh, lambda: on_mesh(order=-1)),
    "memory kind on a mesh": ("memory kind: ", on_mesh, lambda: on_mesh(memory_kind="pinned_host")),
    "kind of sharding": ("sharding: ", on_device, lambda: jax.device_put(on_device(), on_mesh(P()).sharding)),
    "alias": ("same object as: ", lambda: shared(1), lambda: shared(2)),
    "NumPy": ("type: ", lambda: jnp.ones(3), lambda: np.ones(3, np.float32)),
    "byte order": ("dtype: ", lambda: np.zeros(3, ">f4"), lambda: np.zeros(3, "<f4")),
    "scalar": ("type: ", lambda: 1, lambda: np.int64(1)),
    "bool": ("type: ", lambda: 1, lambda: True),
    "number": ("value: ", lambda: 0.1, lambda: 0.1 + 2**-56),
    "key": ("other bits", lambda: jax.random.key(0), lambda: jax.random.key(1)),
    "kind of key": ("dtype: ", lambda: jax.random.key(0), lambda: jax.random.key(0, impl="rbg")),
    "typed key": ("dtype: ", lambda: jax.random.key(0), lambda: jax.random.PRNGKey(0)),
    "None": ("treedef: ", lambda: [1, None], lambda: [1, 2]),
    "container": ("treedef: ", lambda: [1, 2], lambda: (1, 2)),
    "function": ("value: ", lambda: jnp.tanh, lambda: jnp.sin),
}


@pytest.mark.parametrize("case", PAIRS)
def test_the_comparison_finds_every_difference_of_a_state(case: str) -> None:
    expected, *pair = PAIRS[case]
    one, other, again = (Record(describe({"x": make()})) for make in (*pair, pair[0]))
    assert not differences(one, again)
    lines = differences(one, other)
    assert any(expected in line for line in lines), lines


def test_the_comparison_finds_other_steps_counts_and_errors() -> None:
    state, counts = {"w": jnp.ones(3), "n": 1}, {"traces": 1, "compiles": 1}
    good = Record(describe(state), [contents(state)] * 5, counts)
    assert not differences(good, good)
    later = [*good.later[:3], contents({**state, "w": jnp.ones(3) * 2}), *good.later[4:]]
    assert differences(good, good._replace(later=later)) == ["['w']: other contents after step 7"]
    later = [contents({**state, "more": 1}), *good.later[1:]]
    assert differences(good, good._replace(later=later)) == ["other contents after step 4: ['more']"]
    assert "5 steps" in differences(good, good._replace(later=good.later[:4]))[0]
    for name in counts:
        assert f"'{name}': 2" in differences(good, good._replace(counts={**counts, name: 2}))[0]
    for broken in (good._replace(error="ValueError: no"), Record(error="ValueError: no")):
        assert "process 2" in differences(good, broken)[0] and "ValueError: no" in differences(good, broken)[0]
    assert differences(Record(error="ValueError: no"), good) == ["process 1: ValueError: no"]
    assert differences(Record(), good) and differences(good, Record())


def test_addresses_of_functions_are_no_difference() -> None:
    def tree() -> Any:
        return jax.tree_util.Partial(lambda: None, 1)

    assert not differences(Record(describe(tree())), Record(describe(tree())))
