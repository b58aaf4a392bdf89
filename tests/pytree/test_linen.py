"""Tests Flax Linen: train states, frozen dicts, boxed metadata and struct dataclasses."""

from pathlib import Path
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import treering as tr
from helpers import assert_same, assert_survives, every_way
from treering.errors import MismatchError

pytestmark = pytest.mark.compat


class Net(nn.Module):
    """A partitioned and a plain layer around a batch norm."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        x = nn.Dense(4, kernel_init=init)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(3)(nn.relu(x))


class State(TrainState):
    """A train state as applications extend it."""

    batch_stats: Any
    key: jax.Array


NET = Net()
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 100)))
traces: list[int] = []


def fresh(seed: int = 0) -> State:
    variables = NET.init({"params": jax.random.key(seed), "dropout": jax.random.key(seed)}, jnp.ones((2, 3)))
    return State.create(
        apply_fn=NET.apply,
        params=variables["params"],
        tx=OPTIMIZER,
        batch_stats=variables["batch_stats"],
        key=jax.random.key(seed),
    )


@jax.jit
def train_step(state: State) -> State:
    traces.append(1)
    key, use, dropout = jax.random.split(state.key, 3)
    x = jax.random.normal(use, (8, 3))

    def loss(params: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        y, updates = state.apply_fn(variables, x, mutable=["batch_stats"], rngs={"dropout": dropout})
        return jnp.mean((y - x) ** 2), updates

    grads, updates = jax.grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"], key=key)


def train(state: State, steps: int) -> State:
    for _ in range(steps):
        state = train_step(state)
    return state


@pytest.mark.long
def test_paths_read_like_the_state_and_boxes_do_not_show(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", fresh())
    paths = list(tr.open(tmp_path / "a"))
    assert paths[0] == "step" and "params/Dense_0/kernel" in paths and "batch_stats/BatchNorm_0/mean" in paths
    assert "opt_state/1/0/mu/Dense_0/kernel" in paths
    assert not any("value" in path or "apply_fn" in path or "tx" in path for path in paths)


@pytest.mark.long
def test_a_state_before_and_after_training_survives(tmp_path: Path) -> None:
    assert type(fresh().step) is int
    assert_survives(tmp_path, fresh())
    state = train(fresh(), 2)
    assert isinstance(state.step, jax.Array) and state.step.weak_type
    assert_survives(tmp_path, state)


@pytest.mark.parametrize("saved", [0, 2])
@pytest.mark.parametrize("template", [0, 1])
@pytest.mark.long
def test_step_may_be_a_number_or_an_array_on_either_side(tmp_path: Path, saved: int, template: int) -> None:
    state, like = train(fresh(0), saved), train(fresh(7), template)
    for restored, from_shapes in every_way(tmp_path, state, like, jax.eval_shape(lambda: like)):
        assert type(restored.step) is (int if template == 0 else type(like.step))
        assert restored.step == saved
        assert_same(restored.replace(step=0), state.replace(step=0))
        if template:
            assert_same((restored.step.dtype, restored.step.weak_type), (like.step.dtype, like.step.weak_type))
        assert_same(from_shapes.replace(step=0), state.replace(step=0))
        assert from_shapes.step == saved and from_shapes.step.weak_type


@pytest.mark.slow
def test_resumed_training_is_bitwise_equal_without_recompiling(tmp_path: Path) -> None:
    """A resumed training gives the same bits as one without a break, and compiles nothing."""
    interrupted = train(fresh(), 3)
    expected = train(interrupted, 2)
    before = len(traces)
    likes = fresh(7), train(fresh(7), 1), jax.eval_shape(lambda: interrupted)
    for found in every_way(tmp_path, interrupted, *likes):
        for restored in found:
            assert_same(train(restored, 2), expected)
    assert len(traces) == before


@pytest.mark.long
@pytest.mark.whole
def test_linen_functions_come_from_template(tmp_path: Path) -> None:
    """The functions of a train state are those of the template."""
    other = fresh().replace(apply_fn=len)
    for restored in every_way(tmp_path, fresh(), other):
        assert restored.apply_fn is len and restored.tx is OPTIMIZER


def test_boxed_parameters_come_back_in_the_boxes_of_the_template(tmp_path: Path) -> None:
    params = fresh().params
    assert isinstance(params["Dense_0"]["kernel"], nn.Partitioned)
    plain = nn.meta.unbox(params)
    renamed = jax.tree.map(
        lambda box: box.replace(names=("a", "b")) if isinstance(box, nn.Partitioned) else box,
        fresh(7).params,
        is_leaf=lambda x: isinstance(x, nn.Partitioned),
    )
    for saved in (params, plain):
        for boxed, unboxed, on_host in every_way(tmp_path, saved, renamed, plain, None):
            assert boxed["Dense_0"]["kernel"].names == ("a", "b")
            assert_same(nn.meta.unbox(boxed), plain)
            assert_same(unboxed, plain)
            assert_same(on_host, jax.tree.map(np.asarray, plain))


def test_logical_axes_and_nested_boxes(tmp_path: Path) -> None:
    box = nn.LogicallyPartitioned(jnp.arange(3.0), ("embed",))
    tree = {"a": box, "b": [nn.Partitioned(box, ("x",))], "c": nn.Partitioned(None, ("x",))}
    assert_survives(tmp_path, tree)
    assert set(tr.open(next(tmp_path.glob("*/ckpt")))) == {"a", "b/0", "c"}


def test_frozen_dicts_and_dicts_stand_for_each_other(tmp_path: Path) -> None:
    plain = {"params": {"w": jnp.ones(2), "b/c": {"d": np.zeros(3)}}, "n": 3}
    frozen = flax.core.freeze(plain)
    for saved in (frozen, plain):
        for as_frozen, as_plain in every_way(tmp_path, saved, frozen, plain):
            assert isinstance(as_frozen, flax.core.FrozenDict)
            assert_same(as_frozen, frozen)
            assert_same(as_plain, plain)


@flax.struct.dataclass
class Carry:
    """A dataclass with a static field."""

    z: Any
    a: Any
    mode: str = flax.struct.field(pytree_node=False, default="train")


def test_struct_dataclasses_keep_static_fields_out(tmp_path: Path) -> None:
    tree = Carry(z={"x": jnp.ones(2)}, a=[None, 7, Carry(1.5, jax.random.key(0))], mode="train")
    for restored, other in every_way(tmp_path, tree, tree, tree.replace(mode="eval")):
        assert_same(restored, tree)
        assert_same(other, tree.replace(mode="eval"))
    assert set(tr.open(next(tmp_path.glob("*/ckpt")))) == {"z/x", "a/0", "a/1", "a/2/z", "a/2/a"}


def test_a_renamed_layer_is_a_mismatch_that_names_both(tmp_path: Path) -> None:
    state = fresh()
    tr.save(tmp_path / "a", state.params)
    template = {("Head" if name == "Dense_1" else name): value for name, value in state.params.items()}
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "a", like=template)
    message = str(caught.value)
    assert "Head/kernel: expected float32[4,3], found nothing (closest: Dense_1/kernel)" in message
    assert "Dense_1/kernel: expected nothing, found float32[4,3]" in message


class Split(nn.Module):
    """A layer whose kernel has partition metadata."""

    logical: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        partition = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        names = ("embed", "mlp") if self.logical else (None, "model")
        return nn.Dense(16, kernel_init=partition(nn.initializers.lecun_normal(), names))(x)


@pytest.mark.long
@pytest.mark.parametrize("logical", [False, True])
def test_linen_partitioning_is_followed_on_set_mesh(tmp_path: Path, logical: bool) -> None:
    """Arrays go to the places that the template's partition metadata name on the set mesh."""
    model, x = Split(logical), jnp.ones((2, 8))
    variables = model.init(jax.random.key(0), x)
    tr.save(tmp_path / "c", variables)
    template = jax.eval_shape(model.init, jax.random.key(0), x)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules([("embed", None), ("mlp", "model")]):
        restored = tr.restore(tmp_path / "c", template)
    dense = restored["params"]["Dense_0"]
    assert dense["kernel"].value.sharding == jax.NamedSharding(mesh, jax.P(None, "model"))
    assert dense["bias"].sharding == jax.NamedSharding(mesh, jax.P())
    assert_same(jax.tree.map(np.asarray, restored), jax.tree.map(np.asarray, variables))
    without = tr.restore(tmp_path / "c", template)
    assert len(without["params"]["Dense_0"]["kernel"].value.sharding.device_set) == 1


@pytest.mark.long
@pytest.mark.whole
def test_linen_partitioning_unfit_for_mesh_is_refused(tmp_path: Path) -> None:
    """Partition metadata that name an axis which the set mesh lacks are an error."""
    model, x = Split(False), jnp.ones((2, 8))
    tr.save(tmp_path / "c", model.init(jax.random.key(0), x))
    template = jax.eval_shape(model.init, jax.random.key(0), x)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(MismatchError, match=r"params/Dense_0/kernel: .*model"):
        tr.restore(tmp_path / "c", template)
