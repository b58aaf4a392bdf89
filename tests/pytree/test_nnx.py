"""Tests Flax NNX: modules, states, optimizers and random streams, and parts of them."""

import subprocess
import sys
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import treering as tr
from helpers import assert_same, every_way
from treering._pytree import flax
from treering.errors import MismatchError, UnsupportedError

pytestmark = pytest.mark.compat


class Net(nnx.Module):
    """Layers of many kinds. `tied` and `linear.kernel` are one Variable."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 2):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, use_bias=False, rngs=rngs) for _ in range(layers)])
        self.by_name = nnx.Dict({"plain": nnx.Param(jnp.ones(2)), "a/b": nnx.Param(jnp.zeros(3))})
        self.tied = self.linear.kernel
        self.marked = nnx.Param(jnp.ones((2, 2)), out_sharding=("x", None), eager_sharding=False)
        self.calls = nnx.Variable(jnp.array(0))
        self.nested = nnx.Variable({"x": jnp.arange(2), "y": [jnp.zeros(1, jnp.bfloat16), None]})
        self.raw = nnx.data(jnp.arange(3.0))
        self.activation = nnx.relu
        self.name = "net"

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        x = self.dropout(self.activation(self.norm(self.linear(x))))
        for layer in self.layers:
            x = layer(x)
        return x @ self.tied.T


class Odd(nnx.Module):
    """A module with Variables that are not JAX arrays."""

    def __init__(self, fill: int):
        self.python = nnx.Variable(fill)
        self.text = nnx.Variable(str(fill))
        self.nothing = nnx.Param(None)
        self.host = nnx.data(np.full(3, fill))
        self.key = nnx.Variable(jax.random.key(fill, impl="rbg"))
        self.static = "odd"


def assert_same_objects(a: Any, b: Any) -> None:
    """Compares trees of NNX objects like `assert_same`, including static attributes and shared Variables."""
    (graph, state), (other_graph, other_state) = nnx.split(a), nnx.split(b)
    assert graph == other_graph
    assert_same(state, other_state)


def trained(seed: int = 0) -> Net:
    net = Net(nnx.Rngs(seed))
    net(jnp.linspace(-1, 1, 12).reshape(4, 3))
    return net


TEMPLATES = {
    "live": lambda: Net(nnx.Rngs(7)),
    "abstract": lambda: nnx.eval_shape(lambda: Net(nnx.Rngs(7))),
}


@pytest.mark.long
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_nnx_module_round_trip_is_bitwise_equal(tmp_path: Path, template: Callable[[], Net]) -> None:
    """A restored module computes the same bits as the saved one."""
    net, x = trained(), jnp.linspace(-2, 2, 12).reshape(4, 3)
    for restored in every_way(tmp_path, net, template()):
        assert type(restored) is Net and restored.name == "net" and restored.activation is nnx.relu
        assert_same_objects(restored, net)
        other = nnx.clone(net)
        assert_same(restored(x), other(x))
        assert_same_objects(restored, other)


@pytest.mark.long
@pytest.mark.whole
def test_nnx_shared_variable_has_one_path(tmp_path: Path) -> None:
    """Paths have no level for a Variable, and a shared Variable is saved once."""
    tr.save(tmp_path / "a", {"net": Net(nnx.Rngs(0, dropout=1))})
    assert sorted(tr.open(tmp_path / "a")) == [
        *("net/by_name/a~1b", "net/by_name/plain", "net/calls"),
        *("net/dropout/rngs/count", "net/dropout/rngs/key", "net/layers/0/kernel", "net/layers/1/kernel"),
        *("net/linear/bias", "net/linear/kernel", "net/marked", "net/nested/x", "net/nested/y/0", "net/nested/y/1"),
        *("net/norm/bias", "net/norm/mean", "net/norm/scale", "net/norm/var", "net/raw"),
    ]


def test_variables_that_hold_no_jax_array_survive(tmp_path: Path) -> None:
    for restored in every_way(tmp_path, [Odd(1), Odd(2)], [Odd(3), Odd(4)]):
        assert_same_objects(restored, [Odd(1), Odd(2)])
    for restored in every_way(tmp_path, Odd(1), None):
        assert (restored["python"], restored["text"], restored["nothing"]) == (1, "1", None)


@pytest.mark.slow
def test_restoring_into_a_live_module_leaves_that_module_alone(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", trained())
    template = Net(nnx.Rngs(7))
    restored = tr.restore(tmp_path / "a", like=template)
    restored.linear.bias[...] = jnp.full(4, 9.0)
    restored.nested.get_value()["x"] = jnp.zeros(2)
    assert_same_objects(template, Net(nnx.Rngs(7)))


@pytest.mark.long
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_variable_shared_by_two_attributes_stays_shared(tmp_path: Path, template: Callable[[], Net]) -> None:
    for restored in every_way(tmp_path, trained(), template()):
        assert restored.tied is restored.linear.kernel
        restored.tied[...] = jnp.zeros((3, 4))
        assert not restored.linear.kernel[...].any()


@pytest.mark.long
@pytest.mark.whole
def test_what_objects_of_one_tree_share_stays_shared(tmp_path: Path) -> None:
    net = trained()
    for restored in every_way(tmp_path, {"a": net, "b": [net.linear, net]}, {"a": net, "b": [net.linear, net]}):
        assert restored["b"][1] is restored["a"] and restored["b"][0] is restored["a"].linear


def test_a_variable_that_stands_in_the_tree_by_itself(tmp_path: Path) -> None:
    variable = nnx.Param(jnp.arange(3.0))
    tree = {"v": variable, "w": [nnx.BatchStat(jnp.ones(2))]}
    boxed = {"v": nnx.Param(jnp.zeros(3)), "w": [nnx.BatchStat(jnp.zeros(2))]}
    for restored, bare in every_way(tmp_path, tree, boxed, {"v": jnp.zeros(3), "w": [jnp.zeros(2)]}):
        assert type(restored["v"]) is nnx.Param and type(restored["w"][0]) is nnx.BatchStat
        assert_same(restored["v"][...], variable[...])
        assert_same(bare, {"v": jnp.arange(3.0), "w": [jnp.ones(2)]})


@pytest.mark.long
def test_nnx_lone_shared_variable_stays_shared(tmp_path: Path) -> None:
    """A Variable that the tree contains twice is one object after a restore, too."""
    net = trained()
    for tree in ({"a": net.tied, "b": net.tied}, {"net": net, "kernel": net.tied}):
        for restored in every_way(tmp_path, tree, tree):
            first, second = (
                (restored["a"], restored["b"]) if "a" in tree else (restored["net"].tied, restored["kernel"])
            )
            first[...] = first[...] + 1
            assert_same(second[...], first[...])


@pytest.mark.long
def test_a_state_comes_back_as_a_state(tmp_path: Path) -> None:
    net = trained()
    for restored in every_way(tmp_path, nnx.state(net), nnx.state(Net(nnx.Rngs(7)))):
        assert type(restored) is nnx.State
        assert_same(restored, nnx.state(net))
        other = Net(nnx.Rngs(7))
        nnx.update(other, restored)
        assert_same_objects(other, net)


@pytest.mark.long
def test_filtered_and_split_states_survive(tmp_path: Path) -> None:
    net = trained()
    graph, params, rest = nnx.split(net, nnx.Param, ...)
    for restored in every_way(tmp_path, (params, rest), nnx.split(Net(nnx.Rngs(7)), nnx.Param, ...)[1:]):
        assert_same(restored, (params, rest))
        assert_same_objects(nnx.merge(graph, *restored), net)
    for restored in every_way(tmp_path, {"g": graph, "p": params}, {"g": graph, "p": params}):
        assert restored["g"] == graph


@pytest.mark.long
def test_a_module_and_its_state_can_stand_for_each_other(tmp_path: Path) -> None:
    net = trained()
    for restored in every_way(tmp_path, {"m": net}, {"m": nnx.state(Net(nnx.Rngs(7)))}):
        assert_same(restored, {"m": nnx.state(net)})
    for restored in every_way(tmp_path, {"m": nnx.state(net)}, {"m": Net(nnx.Rngs(7))}):
        assert_same_objects(restored["m"], net)
    for restored in every_way(tmp_path, nnx.to_pure_dict(nnx.state(net)), Net(nnx.Rngs(7))):
        assert_same_objects(restored, net)


def test_without_a_template_there_are_plain_dicts_of_arrays(tmp_path: Path) -> None:
    net = trained()
    tr.save(tmp_path / "a", net)
    found = tr.restore(tmp_path / "a")
    assert type(found) is dict and type(found["linear"]["kernel"]) is np.ndarray
    assert np.array_equal(found["linear"]["kernel"], net.linear.kernel[...])
    assert np.array_equal(found["layers"][1]["kernel"], net.layers[1].kernel[...])


def test_the_metadata_of_a_variable_comes_from_the_template(tmp_path: Path) -> None:
    for restored in every_way(tmp_path, trained(), Net(nnx.Rngs(7))):
        assert restored.marked.get_metadata()["out_sharding"] == ("x", None)


@pytest.mark.long
def test_random_streams_go_on_where_they_were(tmp_path: Path) -> None:
    rngs = nnx.Rngs(0, dropout=jax.random.key(3, impl="rbg"))
    rngs.params(), rngs.params(), rngs.dropout()
    template = nnx.Rngs(5, dropout=jax.random.key(0, impl="rbg"))
    for restored in every_way(tmp_path, rngs, template):
        assert_same_objects(restored, rngs)
        other = nnx.clone(rngs)
        assert_same([restored.params(), restored.dropout(), restored()], [other.params(), other.dropout(), other()])


@pytest.mark.long
def test_metrics_survive(tmp_path: Path) -> None:
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    template = nnx.clone(metrics)
    metrics.update(logits=jnp.eye(3), labels=jnp.array([0, 1, 1]), loss=jnp.array([1.0, 2.5, 3.0]))
    for restored in every_way(tmp_path, metrics, template):
        assert_same(restored.compute(), metrics.compute())


def test_modules_without_any_variable_take_no_place(tmp_path: Path) -> None:
    class Empty(nnx.Module):
        def __init__(self, size: int):
            self.size = size

    tree = {"e": Empty(1), "w": np.ones(2), "list": [nnx.Dropout(0.5), Empty(2)]}
    for restored in every_way(tmp_path, tree, {"e": Empty(3), "w": np.zeros(2), "list": [nnx.Dropout(0.1), Empty(4)]}):
        assert (restored["e"].size, restored["list"][0].rate, restored["list"][1].size) == (3, 0.1, 4)
        assert_same(restored["w"], np.ones(2))
    for restored in every_way(tmp_path, Empty(1), Empty(5)):
        assert restored.size == 5


def test_a_template_with_more_layers_is_a_mismatch_by_name(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", {"model": trained()})
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "a", like={"model": Net(nnx.Rngs(0), layers=4)})
    assert "model/layers/2/kernel: expected float32[4,4]" in str(caught.value)
    assert "model/layers/3/kernel: expected float32[4,4]" in str(caught.value)
    assert "2 differences" in str(caught.value)


def test_nnx_unsortable_keys_are_refused_with_path(tmp_path: Path) -> None:
    """Keys that cannot be sorted are an error with their path, also with NNX."""
    with pytest.raises(UnsupportedError, match="in/0: JAX cannot flatten this dict"):
        tr.save(tmp_path / "a", {"in": [{1: np.ones(1), "a": np.ones(1)}]})


def test_what_a_template_unties_is_not_left_out_unnoticed(tmp_path: Path) -> None:
    class Pair(nnx.Module):
        def __init__(self, tied: bool):
            self.a = nnx.Param(jnp.ones(3))
            self.b = self.a if tied else nnx.Param(jnp.zeros(3))

    tr.save(tmp_path / "tied", Pair(True))
    tr.save(tmp_path / "untied", Pair(False))
    with pytest.raises(MismatchError, match="b: expected float32"):
        tr.restore(tmp_path / "tied", like=Pair(False))
    with pytest.raises(MismatchError, match="b: expected nothing, found float32"):
        tr.restore(tmp_path / "untied", like=Pair(True))


@pytest.mark.long
def test_a_vmapped_stack_of_layers_survives(tmp_path: Path) -> None:
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stack(rngs: nnx.Rngs) -> nnx.Linear:
        return nnx.Linear(2, 2, rngs=rngs)

    for restored in every_way(tmp_path, stack(nnx.Rngs(0)), stack(nnx.Rngs(1))):
        assert restored.kernel.shape == (3, 2, 2)
        assert_same_objects(restored, stack(nnx.Rngs(0)))


OPTIMIZER = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10))


def fresh(seed: int) -> dict[str, Any]:
    model = Net(nnx.Rngs(seed))
    return {"model": model, "opt": nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)}


traces: list[int] = []


@nnx.jit
def train_step(model: Net, opt: nnx.Optimizer, x: jax.Array) -> jax.Array:
    traces.append(1)
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
    opt.update(model, grads)
    return loss


def train(state: dict[str, Any], steps: range) -> dict[str, Any]:
    for step in steps:
        train_step(state["model"], state["opt"], jnp.sin(jnp.arange(12.0) + step).reshape(4, 3))
    return state


@pytest.mark.long
def test_resumed_training_is_bitwise_equal_without_recompiling(tmp_path: Path) -> None:
    """A resumed training gives the same bits as one without a break, and compiles nothing."""
    traces.clear()
    state = train(fresh(0), range(3))
    interrupted = nnx.clone(state)
    train(state, range(3, 6))
    assert len(traces) == 1
    for restored in every_way(tmp_path, interrupted, fresh(7)):
        assert_same_objects(restored, interrupted)
        assert_same_objects(train(restored, range(3, 6)), state)
        assert restored["model"].tied is restored["model"].linear.kernel
    assert len(traces) == 1


def test_a_model_and_an_optimizer_that_holds_it(tmp_path: Path) -> None:
    def both(seed: int) -> dict[str, Any]:
        model = Net(nnx.Rngs(seed))
        return {"model": model, "opt": nnx.ModelAndOptimizer(model, OPTIMIZER, wrt=nnx.Param)}

    state = both(0)
    for restored in every_way(tmp_path, state, both(1)):
        assert restored["opt"].model is restored["model"]
        assert_same_objects(restored, state)
    paths = [path for path in tr.open(next(tmp_path.glob("*/ckpt"))) if path.startswith("opt/")]
    assert not any(path.startswith("opt/model") for path in paths) and "opt/step" in paths


@pytest.mark.slow
def test_nnx_model_restores_without_optimizer(tmp_path: Path) -> None:
    """The model is restored alone with `at=`, or with `...` for the optimizer."""
    state = train(fresh(0), range(1))
    tr.save(tmp_path / "a", state)
    assert_same_objects(tr.restore(tmp_path / "a", at="model", like=Net(nnx.Rngs(7))), state["model"])
    only = tr.restore(tmp_path / "a", like={"model": Net(nnx.Rngs(7)), "opt": ...})
    assert_same_objects(only["model"], state["model"])


@pytest.mark.long
def test_nnx_partitioning_is_followed_on_set_mesh(tmp_path: Path) -> None:
    """Arrays go to the places that an abstract module names on the set mesh."""

    def make(seed: int = 0) -> nnx.Linear:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        return nnx.Linear(8, 16, kernel_init=init, rngs=nnx.Rngs(seed))

    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        saved = make(1)
        tr.save(tmp_path / "c", saved)
        module = tr.restore(tmp_path / "c", nnx.eval_shape(make))
        state = tr.restore(tmp_path / "c", nnx.state(nnx.eval_shape(make)))
    for kernel in (module.kernel, state["kernel"]):
        assert kernel.get_value().sharding == jax.NamedSharding(mesh, jax.P(None, "model"))
        assert (np.asarray(kernel.get_value()) == np.asarray(saved.kernel.get_value())).all()
    assert module.bias.get_value().sharding == jax.NamedSharding(mesh, jax.P())


def with_attributes(**attributes: Any) -> nnx.Module:
    module = nnx.Module()
    module.w = module.tied = nnx.Param(jnp.ones(2))
    module.shape = nnx.static(jax.ShapeDtypeStruct((7,), jnp.float32))
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


CONTAINERS: dict[str, Callable[[], nnx.Module]] = {
    "WeightNorm": lambda: nnx.WeightNorm(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)),
    "dict": lambda: with_attributes(a=nnx.data({"x": jnp.arange(2.0), "m": nnx.Linear(1, 1, rngs=nnx.Rngs(2))})),
    "nested": lambda: with_attributes(a=nnx.List([nnx.data(({"x": jnp.ones(1)}, [jnp.zeros(3)]))])),
    "no Variable": lambda: nnx.Dict(a=nnx.data({"x": jnp.arange(2.0)})),
}


@pytest.mark.parametrize("init", CONTAINERS.values(), ids=CONTAINERS)
def test_arrays_in_containers_of_modules_have_shapes(tmp_path: Path, init: Callable[[], nnx.Module]) -> None:
    """NNX takes a shape in a dict for a static value; an array there is a leaf, and so is the shape."""
    tr.save(tmp_path / "a", init())
    assert_same_objects(tr.restore(tmp_path / "a", nnx.eval_shape(init)), init())
    skipped = tr.restore(tmp_path / "a", jax.tree.map(lambda leaf: ..., init()))
    assert set(jax.tree.leaves(skipped)) == {...}
    with pytest.raises(UnsupportedError, match="has no values; save the arrays that restore returns for it"):
        tr.save(tmp_path / "b", nnx.eval_shape(init))


TRACED = {
    "a/0": lambda: with_attributes(a=nnx.List([jnp.ones(2)])),
    "b/k": lambda: with_attributes(b=nnx.Dict(k=jax.random.key(0))),
}


@pytest.mark.parametrize("path", TRACED)
@pytest.mark.parametrize("evaluate", [nnx.eval_shape, jax.eval_shape])
def test_tracers_left_in_templates_are_errors(tmp_path: Path, path: str, evaluate: Callable[..., Any]) -> None:
    tr.save(tmp_path / "a", TRACED[path]())
    template = evaluate(TRACED[path])
    if not flax.has_static(nnx.split(template)[0], jax.core.Tracer):
        pytest.skip("this Flax leaves no tracer")
    with pytest.raises(UnsupportedError, match=f"a tracer: {path}; wrap the array in `nnx.data`"):
        tr.restore(tmp_path / "a", template, extra="ignore")


def test_nnx_cached_plain_state_may_share_variable_later() -> None:
    """A remembered structure does not show shared Variables, so these are looked for every time."""
    one, other = nnx.Param(jnp.zeros(3)), nnx.Param(jnp.ones(3))
    for n, tree in enumerate([{"a": one, "b": other}, {"a": one, "b": other}, {"a": one, "b": one}]):
        shared = flax.split(tree)[0]["b"] is not tree["b"]
        assert shared == (n == 2)
    assert flax.split({"a": 1, "b": 1})[0] == {"a": 1, "b": 1}


def test_a_known_structure_is_not_asked_for_at_every_node() -> None:
    tree = {f"l{n}": {"w": nnx.Param(jnp.full(3, n))} for n in range(100)}
    flax.split(tree)
    with unittest.mock.patch.object(jax.tree, "flatten", wraps=jax.tree.flatten) as flatten:
        flax.split(tree)
    assert [call.kwargs for call in flatten.call_args_list] == [{}]


@jax.tree_util.register_pytree_node_class
class Packed:
    """A weight that makes new arrays whenever it is flattened."""

    def __init__(self, values: jax.Array):
        self.values = values

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.values[:2], self.values[2:]), None

    @classmethod
    def tree_unflatten(cls, aux: None, parts: Any) -> "Packed":
        return cls(jnp.concatenate(parts))


def test_shared_variable_with_new_leaves_is_seen(tmp_path: Path) -> None:
    one, other = (nnx.Param(Packed(jnp.full(4, n))) for n in range(2))
    tr.save(tmp_path / "apart", {"a": one, "b": other})
    tr.save(tmp_path / "shared", {"a": one, "b": one})
    assert list(tr.open(tmp_path / "shared")) == ["a/0", "a/1"]


@pytest.mark.long
def test_a_container_may_restore_something_while_it_is_flattened(tmp_path: Path) -> None:
    """No lock is held while a container is flattened, even if its structure is new."""
    code = f"""
import itertools, jax, jax.numpy as jnp, treering as tr
from flax import nnx
tr.save({str(tmp_path / "other")!r}, {{"x": jnp.ones(2)}})
numbers = itertools.count()
class Box:
    def __init__(self, x): self.x = x
def flat(box):
    template = {{"x": jnp.zeros(2), f"x{{next(numbers)}}": jnp.zeros(2)}}
    tr.restore({str(tmp_path / "other")!r}, template, missing="template")
    return (box.x,), None
jax.tree_util.register_pytree_node(Box, flat, lambda aux, parts: Box(*parts))
tr.save({str(tmp_path / "mine")!r}, {{"b": Box(jnp.ones(3))}})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.long
def test_scanned_layers_with_dropout_become_a_list_and_back(tmp_path: Path) -> None:
    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(2, 2, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def scanned(seed: int) -> Any:
        return nnx.split_rngs(splits=3)(nnx.vmap(Layer))(nnx.Rngs(seed, dropout=seed + 1))

    def listed(seed: int) -> Any:
        rngs = nnx.Rngs(seed, dropout=seed + 1)
        return nnx.List([Layer(rngs) for _ in range(3)])

    one, other = {"layers": scanned(0)}, {"layers": listed(2)}
    nnx.vmap(lambda layer: layer.dropout(jnp.ones(2)))(one["layers"])  # counts the stream
    tr.save(tmp_path / "scanned", one)
    other = tr.restore(tmp_path / "scanned", other, rules=[tr.rules.unstack("layers/*/**")])
    tr.save(tmp_path / "listed", other)
    again = tr.restore(tmp_path / "listed", {"layers": scanned(4)}, rules=[tr.rules.stack("layers/*/**")])
    assert not tr.diff(one, again) and not tr.diff(tmp_path / "scanned", again)
    drawn = [layer.dropout(jnp.ones(64)) for layer in other["layers"]]
    expected = nnx.vmap(lambda layer: layer.dropout(jnp.ones(64)))(again["layers"])
    assert (jnp.stack(drawn) == expected).all() and len({tuple(row.tolist()) for row in drawn}) == 3
