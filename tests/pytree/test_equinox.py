"""Tests Equinox modules: function leaves, static fields, holes, stateful layers and shared nodes."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treering as tr
from helpers import assert_same, assert_survives, every_way
from treering.errors import MismatchError

pytestmark = pytest.mark.compat


def mlp(seed: int = 0, depth: int = 2, **options: Any) -> eqx.nn.MLP:
    return eqx.nn.MLP(3, 2, 4, depth, key=jax.random.key(seed), **options)


class Block(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    scale: float
    extra: Any
    name: str = eqx.field(static=True)

    def __init__(self, seed: int = 0, name: str = "block", scale: float = 1.5):
        self.linear = eqx.nn.Linear(3, 4, key=jax.random.key(seed))
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)
        self.scale = scale
        self.extra = {"none": None, "np": np.arange(3), "text": "x"}
        self.name = name

    def __call__(self, x: jax.Array, state: eqx.nn.State, key: jax.Array) -> tuple[jax.Array, eqx.nn.State]:
        x, state = self.norm(self.linear(x) * self.scale, state)
        return self.dropout(x, key=key), state


@eqx.filter_jit
def run(model: Block, state: eqx.nn.State, x: jax.Array, key: jax.Array) -> tuple[jax.Array, eqx.nn.State]:
    keys = jax.random.split(key, len(x))
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
    return batched(x, state, keys)


@pytest.mark.long
def test_equinox_paths_are_attributes(tmp_path: Path) -> None:
    """Attributes name the leaves of a module, and its functions are leaves without arrays."""
    tr.save(tmp_path / "a", mlp())
    ckpt = tr.open(tmp_path / "a")
    layers = [f"layers/{i}/{name}" for i in range(3) for name in ("weight", "bias")]
    assert list(ckpt) == [*layers, "activation", "final_activation"]
    assert ckpt["activation"] is None and ckpt["layers/0/weight"].shape == (4, 3)


@pytest.mark.long
@pytest.mark.whole
def test_a_module_with_functions_and_static_fields_survives(tmp_path: Path) -> None:
    assert_survives(tmp_path, mlp(activation=lambda x: x * 2, final_activation=jnp.tanh))
    assert_survives(tmp_path, {"model": mlp(use_bias=False), "bound": [mlp(1)]})


@pytest.mark.long
def test_a_restored_model_computes_the_same_bits(tmp_path: Path) -> None:
    model, x = mlp(0), jnp.linspace(-1, 1, 3)
    compute = eqx.filter_jit(lambda model, x: model(x))
    expected = compute(model, x)
    for found in every_way(tmp_path, model, mlp(1), eqx.filter_eval_shape(mlp)):
        for restored in found:
            assert_same(restored, model)
            assert_same(compute(restored, x), expected)


def test_restoring_into_a_live_module_leaves_that_module_alone(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", mlp(0))
    template = mlp(1)
    assert tr.restore(tmp_path / "a", like=template) is not template
    assert_same(template, mlp(1))


def test_partitioned_trees_with_holes_survive_and_combine(tmp_path: Path) -> None:
    model = mlp()
    arrays, rest = eqx.partition(model, eqx.is_array)
    for restored in every_way(tmp_path, arrays, eqx.partition(mlp(1), eqx.is_array)[0]):
        assert_same(eqx.combine(restored, rest), model)
    assert_survives(tmp_path, rest)
    spec = eqx.tree_at(lambda m: m.layers[1].weight, jax.tree.map(lambda _: False, model), True)
    trained, frozen = eqx.partition(model, spec)
    assert_survives(tmp_path, (trained, frozen))


def test_equinox_partition_restores_as_a_full_model(tmp_path: Path) -> None:
    """A partition restores from a checkpoint of the entire model, and the other way round."""
    tr.save(tmp_path / "whole", mlp(0))
    tr.save(tmp_path / "arrays", eqx.filter(mlp(0), eqx.is_array))
    assert_same(tr.restore(tmp_path / "arrays", like=mlp(1)), mlp(0))
    assert_same(tr.restore(tmp_path / "whole", like=eqx.filter(mlp(1), eqx.is_array)), eqx.filter(mlp(0), eqx.is_array))


def test_equinox_none_in_place_of_array_is_refused(tmp_path: Path) -> None:
    """A None in the template is a difference if the checkpoint has an array there."""
    tr.save(tmp_path / "a", mlp())
    template = eqx.tree_at(lambda m: m.layers[1].bias, mlp(), None)
    with pytest.raises(MismatchError, match="layers/1/bias: expected None"):
        tr.restore(tmp_path / "a", like=template)


@pytest.mark.long
def test_a_layer_with_state_resumes_with_the_same_bits(tmp_path: Path) -> None:
    model, state = eqx.nn.make_with_state(Block)(0)
    x, key = jnp.linspace(-2, 2, 15).reshape(5, 3), jax.random.key(9)
    _, state = run(model, state, x, key)
    expected = run(model, state, x + 1, key)
    live = eqx.nn.make_with_state(Block)(7)
    abstract = eqx.filter_eval_shape(eqx.nn.make_with_state(Block), 7)
    for restored, from_shapes in every_way(tmp_path, (model, state), live, abstract):
        assert_same(restored, (model, state))
        assert_same(run(*restored, x + 1, key), expected)
        assert_same(run(*from_shapes, x + 1, key), expected)


def test_the_state_alone_survives(tmp_path: Path) -> None:
    _, state = eqx.nn.make_with_state(Block)(0)
    assert_survives(tmp_path, state)


def test_a_changed_static_field_comes_from_the_template(tmp_path: Path) -> None:
    model, _ = eqx.nn.make_with_state(Block)(0, name="old")
    template, _ = eqx.nn.make_with_state(Block)(1, name="new")
    for restored in every_way(tmp_path, model, template):
        assert restored.name == "new"
        assert_same(restored.linear, model.linear)


def test_equinox_number_field_is_restored(tmp_path: Path) -> None:
    """A Python number in a field is restored from the checkpoint."""
    model, _ = eqx.nn.make_with_state(Block)(0, scale=0.1)
    template, _ = eqx.nn.make_with_state(Block)(0, scale=7.0)
    for restored in every_way(tmp_path, model, template):
        assert_same(restored.scale, 0.1)
        assert_same(restored.extra, model.extra)


@pytest.mark.long
def test_every_path_of_a_template_with_more_layers_is_listed(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", mlp(depth=1))
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "a", like=mlp(depth=3))
    message = str(caught.value)
    for path in (f"layers/{layer}/{name}" for layer in (1, 2, 3) for name in ("weight", "bias")):
        assert f"  {path}: expected " in message
    assert "layers/0" not in "".join(line.split(":")[0] for line in message.splitlines()[1:])
    assert "6 differences" in message


def test_every_path_of_a_checkpoint_with_more_layers_is_listed(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", mlp(depth=2))
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "a", like=mlp(depth=1))
    assert "layers/2/weight: expected nothing, found float32[2,4]" in str(caught.value)
    assert "layers/2/bias: expected nothing, found float32[2]" in str(caught.value)


@pytest.mark.long
def test_shared_layers_stay_shared(tmp_path: Path) -> None:
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, seed: int):
            keys = jax.random.split(jax.random.key(seed))
            embedding, head = eqx.nn.Embedding(5, 3, key=keys[0]), eqx.nn.Linear(3, 5, use_bias=False, key=keys[1])
            self.shared = eqx.nn.Shared((embedding, head), lambda two: two[1].weight, lambda two: two[0].weight)

        def __call__(self, token: jax.Array) -> jax.Array:
            embedding, head = self.shared()
            return head(embedding(token))

    model = Tied(0)
    for restored in every_way(tmp_path, model, Tied(1)):
        assert_same(eqx.filter(restored, eqx.is_array), eqx.filter(model, eqx.is_array))
        assert_same(restored(jnp.array(2)), model(jnp.array(2)))


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_an_array_in_a_static_field_does_not_disturb(tmp_path: Path) -> None:
    class Masked(eqx.Module):
        weight: jax.Array
        mask: np.ndarray = eqx.field(static=True)

    for n in range(3):
        model = Masked(jnp.full(3, float(n)), np.arange(3) + n)
        tr.save(tmp_path / str(n), [model, model])
        first, second = tr.restore(tmp_path / str(n), like=[model, model])
        assert_same([first.weight, second.weight], [model.weight] * 2)
        assert first.mask is model.mask


@pytest.mark.long
def test_resumed_training_is_bitwise_equal_without_recompiling(tmp_path: Path) -> None:
    """A resumed training gives the same bits as one without a break, and compiles nothing."""
    optimizer = optax.adamw(1e-2)
    traces = []

    @eqx.filter_jit
    def train_step(model: Any, opt_state: Any, key: jax.Array) -> Any:
        traces.append(1)
        key, use = jax.random.split(key)
        x = jax.random.normal(use, (8, 3))
        grads = eqx.filter_grad(lambda m: jnp.mean((jax.vmap(m)(x) - x[:, :2]) ** 2))(model)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, key

    def fresh(seed: int) -> Any:
        return mlp(seed), optimizer.init(eqx.filter(mlp(seed), eqx.is_array)), jax.random.key(seed)

    state = fresh(0)
    for _ in range(3):
        state = train_step(*state)
    interrupted = state
    for _ in range(3):
        state = train_step(*state)
    for restored in every_way(tmp_path, interrupted, fresh(5)):
        for _ in range(3):
            restored = train_step(*restored)
        assert_same(restored, state)
    assert len(traces) == 1
