"""Tests descriptions of trees that were described before. They are fast, and always those of the present tree."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from helpers import assert_same
from treering._pytree import leaves, live_tree, walk
from treering.errors import UnsupportedError

pytestmark = pytest.mark.compat

OPTIONS: dict[str, Any] = {"dtype": None, "detach": True, "single_process": True}


def described(tree: Any, **options: Any) -> leaves.Described:
    flat_tree = walk.flatten_tree(tree)
    return live_tree.describe_cached(flat_tree.paths, flat_tree.leaves, **{**OPTIONS, **options})


def plainly(tree: Any, **options: Any) -> leaves.Described:
    flat_tree = walk.flatten_tree(tree)
    return leaves.describe_leaves(flat_tree.paths, flat_tree.leaves, **{**OPTIONS, **options})


def parts(found: leaves.Described) -> Any:
    return found.catalogue, tuple(found.shards), [np.asarray(one).tobytes() for one in found.data]


def make(step: int, changed: dict[str, Any] | None = None) -> dict[str, Any]:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    w = jnp.full((3, 5), step, jnp.float32)
    tree = {
        "w": w,
        "tied": w,
        "b": jnp.full(7, step, jnp.bfloat16),
        "weak": jnp.asarray(1.5) * step,
        "packed": jnp.full(6, step % 7, jnp.int4),
        "key": jax.random.key(step),
        "keys": jax.random.split(jax.random.key(step), 3),
        "spread": jax.device_put(np.arange(16, dtype=np.int32) + step, jax.NamedSharding(mesh, jax.P("x"))),
        "copied": jax.device_put(np.arange(4.0) + step, jax.NamedSharding(mesh, jax.P())),
        "step": step,
        "name": f"step {step}",
        "none": None,
    }
    return {**tree, **(changed or {})}


@pytest.mark.long
@pytest.mark.whole
def test_cached_tree_has_same_shards_and_new_values() -> None:
    """A structure described again has the same shards object, with the present values."""
    first = described(make(1))
    for step in (2, 3):
        tree = make(step)
        found = described(tree)
        assert found.shards is first.shards
        assert parts(found) == parts(plainly(tree))


def spread(*axes: str | None) -> jax.Array:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(np.arange(16, dtype=np.int32), jax.NamedSharding(mesh, jax.P(*axes)))


@pytest.mark.parametrize(
    "changed",
    [
        {"b": jnp.ones(8, jnp.bfloat16)},
        {"b": jnp.ones(7, jnp.float16)},
        {"b": np.ones(7, np.float32)},
        {"b": jax.device_put(jnp.ones(7, jnp.bfloat16), jax.devices()[3])},
        {"weak": jnp.float32(1.5)},
        {"tied": jnp.ones((3, 5))},
        {"key": jax.random.key(0, impl="rbg")},
        {"key": jnp.zeros(2, jnp.uint32)},
        {"spread": spread()},
        {"spread": jnp.arange(16)},
        {"step": 1.0},
        {"step": np.int64(3)},
        {"step": jnp.int32(3)},
        {"name": b"step"},
    ],
    ids=lambda changed: "-".join(f"{name} {getattr(one, 'dtype', type(one))}" for name, one in changed.items()),
)
def test_changed_trees_are_described_again(changed: dict[str, Any]) -> None:
    first = described(make(1))
    tree = make(2, changed)
    if "tied" not in changed:
        tree["tied"] = tree["w"]
    found = described(tree)
    assert parts(found) == parts(plainly(tree))
    assert found.shards is not first.shards or type(changed.get("step")) is float
    again = make(3)
    assert parts(described(again)) == parts(plainly(again))


def test_arrays_that_become_one_object_are_tied() -> None:
    tree = {"a": jnp.zeros(3), "b": jnp.zeros(3)}
    separate = described(tree)
    one = jnp.ones(3)
    assert described({"a": one, "b": one}).catalogue.tied == {1: 0}
    assert not described(tree).catalogue.tied and parts(described(tree)) == parts(separate)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"detach": False},
        {"dtype": np.dtype("float64")},
    ],  # NumPy says that this dtype is equal to None
    ids=str,
)
@pytest.mark.parametrize("first", [True, False])
def test_other_options_are_another_description(options: dict[str, Any], first: bool) -> None:
    tree = {f"{options}{first}": jnp.ones(3), "packed": jnp.ones(3, jnp.int4)}
    wished = [options, {}, options, {}] if first else [{}, options, {}, options]
    found = [described(tree, **one) for one in wished]
    assert [parts(one) for one in found] == [parts(plainly(tree, **one)) for one in wished]
    assert found[0].shards is found[2].shards and found[1].shards is found[3].shards


def test_no_value_is_kept_for_the_next_save() -> None:
    tree = {"text": "x" * 1000, "w": jnp.ones(3)}
    described(tree)
    assert [entry.type for entry in live_tree._cache[0].catalogue.entries] == ["none", "jax"]
    entry: Any = described(tree).catalogue.entries[0]
    assert entry.decode() == tree["text"]


def test_what_cannot_be_saved_is_named_the_second_time_as_well() -> None:
    described(make(1))
    tree = make(2)
    tree["b"].delete()
    with pytest.raises(UnsupportedError, match="b: this array was deleted"):
        described(tree)
    with pytest.raises(UnsupportedError, match="name: "):
        described(make(2, {"name": "\ud800"}))


@pytest.mark.parametrize("key", [False, True])
def test_array_without_some_of_its_shards_is_refused(key: bool) -> None:
    """JAX spares a shard that has a NumPy view, takes the others, and says that the array is not deleted."""
    sharding = NamedSharding(jax.make_mesh((2,), ("d",)), P("d"))
    data = jax.device_put(jnp.zeros((4, 2), jnp.uint32), sharding)
    donate = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    for _ in range(2):  # the second time as a description that is known
        tree = {"w": jax.random.wrap_key_data(data + 1, impl="threefry2x32") if key else data + 1}
        described(tree)
        base = jax.random.key_data(tree["w"]) if key else tree["w"]
        view = np.asarray(base.addressable_shards[0].data)
        jax.block_until_ready(donate(base))
        assert not tree["w"].is_deleted() and view.any()
        with pytest.raises(UnsupportedError, match="w: this array was deleted"):
            described(tree)


def test_a_loop_saves_what_it_has_in_each_step(tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step in range(4):
            ckpts.save(step, make(step))
    for step in range(4):
        assert_same(tr.restore(tmp_path / "run", make(step), step=step), make(step))
