"""Tests Optax: the state of every kind of transformation, and the errors for the state of another chain."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import treering as tr
from helpers import assert_same, assert_survives, every_way
from treering.errors import MismatchError

pytestmark = pytest.mark.compat


def params(fill: float = 1.0) -> dict[str, Any]:
    return {
        "w": jnp.full((3, 2), fill),
        "b": jnp.zeros(2),
        "deep": [jnp.arange(4.0), {"x/y": jnp.ones(2)}],
    }


LABELS = {"w": "adam", "b": "none", "deep": ["sgd", {"x/y": "adam"}]}
MASK = {"w": True, "b": False, "deep": [False, {"x/y": True}]}
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 20)

TRANSFORMS: dict[str, optax.GradientTransformation] = {
    "sgd, nothing but empty states": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2)),
    "momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-3),
    "chain with a schedule": optax.chain(optax.clip(1.0), optax.adamw(SCHEDULE), optax.identity()),
    "named chain": optax.named_chain(("clip", optax.clip(1.0)), ("a/b", optax.adam(1e-3))),
    "multi_transform": optax.multi_transform(
        {"adam": optax.adam(SCHEDULE), "sgd": optax.sgd(0.1, momentum=0.9), "none": optax.set_to_zero()}, LABELS
    ),
    "masked": optax.masked(optax.adam(1e-3), MASK),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3, weight_decay=1e-4),
    "inject_hyperparams with a schedule": optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-3), 3),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-3), every_k_schedule=3).gradient_transformation(),
    "ema": optax.chain(optax.adam(1e-3), optax.ema(0.99)),
    "adafactor": optax.adafactor(1e-3),
    "amsgrad in bfloat16": optax.chain(optax.scale_by_amsgrad(mu_dtype=jnp.bfloat16), optax.scale(-1e-3)),
    "noise with a key": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1)),
    "lion and centralize": optax.chain(optax.centralize(), optax.lion(1e-3)),
    "conditionally": optax.conditionally_transform(optax.adam(1e-3), lambda step: step % 2 == 0),
    "flatten": optax.flatten(optax.adam(1e-3)),
    "three of a chain": optax.chain(
        optax.adaptive_grad_clip(0.1), optax.trace(0.9), optax.scale_by_learning_rate(SCHEDULE)
    ),
}


def advance(tx: optax.GradientTransformation, weights: Any, state: Any) -> tuple[Any, Any]:
    updates, state = tx.update(jax.tree.map(jnp.cos, weights), state, weights)
    return optax.apply_updates(weights, updates), state


@pytest.mark.long
@pytest.mark.parametrize("name", TRANSFORMS)
def test_optax_state_restores_into_any_template(tmp_path: Path, name: str) -> None:
    """A state restores into itself, into a new state, and into shapes."""
    tx = TRANSFORMS[name]
    state = jax.jit(lambda weights: advance(tx, weights, tx.init(weights)))(params())
    templates = state, (params(0.5), tx.init(params(0.5))), jax.eval_shape(lambda: state)
    for restored, from_fresh, from_shapes in every_way(tmp_path, state, *templates):
        assert_same(restored, state)
        assert_same(from_shapes, state)
        assert jax.tree.all(jax.tree.map(lambda a, b: _value(a) == _value(b), from_fresh, state))


def _value(x: Any) -> Any:
    data = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return data.dtype, data.tobytes()


@pytest.mark.long
def test_the_optimizers_of_jax_itself(tmp_path: Path) -> None:
    """The `OptimizerState` of JAX is a named tuple that is registered with children of its own."""
    from jax.example_libraries import optimizers

    for init, update, get in (optimizers.adam(1e-3), optimizers.momentum(1e-2, 0.9), optimizers.sgd(1e-2)):
        state = update(0, jax.tree.map(jnp.cos, params()), init(params()))
        shapes = jax.eval_shape(lambda state=state: state)
        for restored, from_shapes in every_way(tmp_path, (1, state), (0, state), (0, shapes)):
            assert_same(restored, (1, state))
            assert_same(from_shapes, (1, state))
            assert_same(*[get(update(1, params(), one)) for one in (restored[1], state)])


def test_a_state_of_empty_states_alone(tmp_path: Path) -> None:
    state = optax.chain(optax.clip(1.0), optax.identity(), optax.scale(2.0)).init(params())
    assert not jax.tree.leaves(state)
    assert_survives(tmp_path, state)
    assert_survives(tmp_path, {"params": params(), "opt": state})


def test_masked_nodes_take_no_place(tmp_path: Path) -> None:
    state = TRANSFORMS["masked"].init(params())
    assert isinstance(state.inner_state[0].mu["b"], optax.MaskedNode)
    for restored in every_way(tmp_path, state, state):
        assert isinstance(restored.inner_state[0].mu["b"], optax.MaskedNode)
    paths = set(tr.open(next(tmp_path.glob("*/ckpt"))))
    assert "inner_state/0/mu/w" in paths and not any(path.startswith("inner_state/0/mu/b") for path in paths)


def test_a_changed_mask_is_a_mismatch(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", TRANSFORMS["masked"].init(params()))
    other = optax.masked(optax.adam(1e-3), {**MASK, "b": True, "w": False}).init(params())
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "a", like=other)
    assert "inner_state/0/mu/b: expected float32[2], found nothing" in str(caught.value)
    assert "inner_state/0/mu/w: expected nothing, found float32[3,2]" in str(caught.value)


def test_fields_of_named_tuples_are_in_the_paths(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", TRANSFORMS["chain with a schedule"].init(params()))
    assert set(tr.open(tmp_path / "a")) == {
        *("1/0/count", "1/2/count"),
        *(f"1/0/{moment}/{leaf}" for moment in ("mu", "nu") for leaf in ("b", "w", "deep/0", "deep/1/x~1y")),
    }


@pytest.mark.parametrize(
    ("one", "other", "classes"),
    [
        (optax.scale_by_adam(), optax.scale_by_belief(), ("ScaleByAdamState", "ScaleByBeliefState")),
        (
            optax.scale_by_schedule(SCHEDULE),
            optax.add_decayed_weights(SCHEDULE),
            ("ScaleByScheduleState", "WeightDecaySchedule"),
        ),
        (optax.scale_by_rss(), optax.masked(optax.identity(), MASK), ("ScaleByRssState", "MaskedState")),
    ],
    ids=["moments", "counts", "other fields"],
)
def test_optax_reordered_chain_is_refused(tmp_path: Path, one: Any, other: Any, classes: tuple[str, str]) -> None:
    """A reordered chain is an error, because its states have other classes."""
    tr.save(tmp_path / "a", {"opt": optax.chain(one, other).init(params())})
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "a", like={"opt": optax.chain(other, one).init(params())})
    assert f"opt/0: expected {classes[1]}, found {classes[0]}" in str(caught.value)
    assert f"opt/1: expected {classes[0]}, found {classes[1]}" in str(caught.value)


def test_optax_other_optimizer_in_wrapper_is_refused(tmp_path: Path) -> None:
    """Another optimizer is an error, even within wrappers, because its states have other classes."""

    def wrapped(tx: optax.GradientTransformation) -> Any:
        return optax.apply_if_finite(optax.MultiSteps(optax.masked(tx, MASK), 2).gradient_transformation(), 1)

    tr.save(tmp_path / "a", wrapped(optax.scale_by_adam()).init(params()))
    with pytest.raises(MismatchError, match="expected ScaleByBeliefState, found ScaleByAdamState"):
        tr.restore(tmp_path / "a", like=wrapped(optax.scale_by_belief()).init(params()))


def test_optax_other_chain_length_is_refused(tmp_path: Path) -> None:
    """An empty state moves the paths of the states after it, so another chain is an error."""
    tr.save(tmp_path / "a", optax.chain(optax.clip(1.0), optax.scale_by_adam()).init(params()))
    with pytest.raises(MismatchError, match=r"0/count: expected int32.*closest: 1/count"):
        tr.restore(tmp_path / "a", like=optax.chain(optax.scale_by_adam(), optax.clip(1.0)).init(params()))


@pytest.mark.long
@pytest.mark.whole
def test_a_learning_rate_set_by_hand_is_never_rounded_unnoticed(tmp_path: Path) -> None:
    tx = TRANSFORMS["inject_hyperparams"]
    state, by_hand = tx.init(params()), tx.init(params())
    by_hand.hyperparams["learning_rate"] = 0.1
    assert_survives(tmp_path, by_hand)
    tr.save(tmp_path / "a", by_hand)
    with pytest.raises(MismatchError, match=r"hyperparams/learning_rate: expected float32\[\], found float"):
        tr.restore(tmp_path / "a", like=state)


@pytest.mark.long
def test_optax_widened_moment_is_not_narrowed(tmp_path: Path) -> None:
    """A moment that an update made wider is not narrowed to the dtype of a new state."""
    weights, tx = {"a": jnp.ones(2), "w": jnp.ones(2, jnp.bfloat16)}, TRANSFORMS["inject_hyperparams"]
    _, state = advance(tx, weights, tx.init(weights))
    assert state.inner_state[0].mu["w"].dtype == jnp.float32  # by the float32 hyperparameters
    assert_survives(tmp_path, state)
    path = next(tmp_path.glob("*/ckpt"))
    with pytest.raises(MismatchError, match="mu/w: expected bfloat16"):
        tr.restore(path, like=tx.init(weights))
    narrowed = tr.restore(path, like=tx.init(weights), dtype="template")
    assert_same(narrowed.inner_state[0].mu["w"], state.inner_state[0].mu["w"].astype(jnp.bfloat16))


@pytest.mark.long
def test_a_jitted_update_is_not_traced_again_after_a_restore(tmp_path: Path) -> None:
    tx = TRANSFORMS["inject_hyperparams with a schedule"]
    traces = []

    @jax.jit
    def update(weights: Any, state: Any) -> Any:
        traces.append(1)
        return advance(tx, weights, state)

    start = params(), tx.init(params())
    state = update(*update(*start))
    before = len(traces)
    for found in every_way(tmp_path, state, state, start, jax.eval_shape(lambda: state)):
        for restored in found:
            assert_same(update(*restored), update(*state))
    assert len(traces) == before
