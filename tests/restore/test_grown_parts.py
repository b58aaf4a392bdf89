"""Tests states whose lists, dicts and arrays grow: the errors of a restart, and the argument that they advise."""

import collections
import logging
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import treering as tr
from helpers import assert_same
from treering._core.leaf_paths import relative_to
from treering._restore import grown_parts
from treering.errors import MismatchError

pytestmark = pytest.mark.compat

W = jnp.arange(3.0)


@flax.struct.dataclass
class State:
    w: Any
    losses: Any


class Entry(NamedTuple):
    w: Any
    loss: Any


def layer(seed: int) -> Any:
    return eqx.nn.Linear(2, 2, key=jax.random.key(seed))


# What `init` makes, and the state that is saved later.
GROWING: dict[str, tuple[Any, Any]] = {
    "losses": ({"history": []}, {"history": [0.5, 0.25]}),
    "more losses": ({"history": [0.0] * 3}, {"history": [0.1, 0.2, 0.3, 0.4, 0.5]}),
    "a shorter queue": ({"queue": [1, 2, 3]}, {"queue": [7]}),
    "a dict": ({"m": {}}, {"m": {"a": [1, 2], "b": {"c": W, "d": np.ones(2)}}}),
    "more keys": ({"m": {"a": 0.0}}, {"m": {"a": 1.0, "b": jnp.float32(2), "c": {"d": [True]}}}),
    "a new entry of the state": ({"w": W}, {"w": W, "best": {"loss": 0.5}}),
    "a buffer": ({"buffer": jnp.zeros((0, 3))}, {"buffer": jnp.ones((25, 3))}),
    "a NumPy buffer": ({"buffer": np.zeros((0, 3), np.int8)}, {"buffer": np.ones((25, 3), np.int8)}),
    "a longer buffer": ({"buffer": jnp.zeros(10, jnp.bfloat16)}, {"buffer": jnp.ones(25, jnp.bfloat16)}),
    "a buffer with more axes": ({"buffer": jnp.zeros(0)}, {"buffer": jnp.ones((5, 2))}),
    "a tuple": ({"h": ()}, {"h": (1.0, jnp.float32(2))}),
    "None": ({"best": None}, {"best": {"w": W}}),
    "None for an array": ({"best": None}, {"best": W}),
    "a dataclass": (State(W, []), State(W, [1.0, 2.0])),
    "a list alone": ([], [W, 1.0]),
    "other dicts": (
        {"o": collections.OrderedDict(), "d": collections.defaultdict(list)},
        {"o": collections.OrderedDict(b=1, a=2), "d": collections.defaultdict(list, x=[1.0])},
    ),
    "several": ({"a": [], "b": {"c": (), "d": np.zeros(0)}}, {"a": [1], "b": {"c": ("x",), "d": np.ones(4)}}),
    "all kinds": ({"a": []}, {"a": [jax.random.key(3), b"x", None, np.float32(1), jnp.asarray(1.0), 1j, 1 << 70]}),
    "named tuples": ({"h": [Entry(W, 0.0)]}, {"h": [Entry(W, 1.0), Entry(W * 2, 2.0)]}),
    "layers": ({"layers": [layer(0)]}, {"layers": [layer(1), layer(2)]}),
    "next to an optimizer": (
        {"opt": optax.adam(1e-3).init({"w": W}), "h": []},
        {"opt": optax.adam(1e-3).init({"w": W}), "h": [1.0]},
    ),
}


def advised(error: pytest.ExceptionInfo[MismatchError]) -> list[str]:
    """Returns what the error says to pass as `grow`."""
    found = {path for text in re.findall(r"grow=(\[[^\]]*\])", str(error.value)) for path in eval(text)}
    return sorted(found)


@pytest.mark.parametrize("name", GROWING)
def test_a_state_that_grows_comes_back_as_the_error_advises(tmp_path: pathlib.Path, name: str) -> None:
    begin, state = GROWING[name]
    init: Callable[[], Any] = lambda: jax.tree.map(lambda leaf: leaf, begin)  # noqa: E731
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.restore_or_init(init, grow=["history"])
        ckpts.save(1, state)
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        with pytest.raises(MismatchError) as caught:
            ckpts.restore_or_init(init)
        grow = advised(caught)
        for found in (ckpts.restore_or_init(init, grow=grow)[0], ckpts.restore(init(), grow=grow)):
            assert jax.tree.structure(found) == jax.tree.structure(state)
            assert_same(found, state)
        ckpts.save(2, found)
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        assert_same(ckpts.restore_or_init(init, grow=grow)[0], state)
    named = re.search(r"likely: .*", str(caught.value))
    if name in ("losses", "more losses", "a shorter queue", "a dict", "a buffer", "several"):
        assert named is not None and "has changed during training: grow=[" in named[0]


def test_the_template_alone_decides_whether_a_part_may_grow(tmp_path: pathlib.Path) -> None:
    """Nothing is revived or dropped without `grow`, also if the template has nothing there."""
    adam = optax.adam(1e-3)
    params = {"dense": {"w": W}, "head": {"k": W * 2}}
    saved = {"params": params, "opt": adam.init(params), "adapters": {"a": W}, "layers": [W, W, W]}
    tr.save(tmp_path / "c", saved)
    fewer = {"dense": params["dense"]}
    templates = [
        {**saved, "params": fewer},
        {**saved, "params": fewer, "opt": adam.init(fewer)},
        {**saved, "params": {}, "opt": adam.init({})},
        {**saved, "adapters": {}},
        {**saved, "adapters": None},
        {**saved, "layers": [W]},
        {**saved, "layers": []},
    ]
    for template in templates:
        with pytest.raises(MismatchError) as caught:
            tr.restore(tmp_path / "c", template)
        assert all("grow" not in one.hint for one in caught.value.differences if one.path.startswith("opt"))
        with pytest.raises(MismatchError):
            tr.restore(tmp_path / "c", template, grow=["other", "opt/*", "**/bias"])
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "c", templates[1])
    assert "likely: the template lacks " in str(caught.value) and "grow" not in str(caught.value)


def test_what_cannot_be_made_is_an_error_that_says_how_to_get_it(tmp_path: pathlib.Path) -> None:
    saved = {"w": W, "h": [Entry(W, 1.0), Entry(W, 2.0)], "data": [np.random.default_rng(0)]}
    path = tr.save(tmp_path / "c", saved).path
    template = {"w": W, "h": [], "data": []}
    with pytest.raises(MismatchError) as caught:
        tr.restore(path, template)
    assert "grow= cannot make it; at='h' restores it alone, in dicts" in str(caught.value)
    assert [entry["loss"] for entry in tr.restore(path, at="h")] == [1.0, 2.0]
    with pytest.raises(MismatchError, match="h/0: expected a list, tuple, dict, array or number, found a Entry"):
        tr.restore(path, template, grow=["h", "data"])
    for grow in ("h", [1], None):
        with tr.Checkpointer(tmp_path) as ckpts, pytest.raises(MismatchError, match=r"grow=.*: expected a list of"):
            ckpts.restore_or_init(lambda: template, grow=grow)


@pytest.mark.parametrize("at", ["", "x"])
def test_a_list_in_place_of_a_dict_is_not_said_to_grow(tmp_path: pathlib.Path, at: str) -> None:
    saved, like = {"a": 1, "b": 2}, [1, 2]
    tr.save(tmp_path / "c", {at: saved, "k": 0} if at else saved)
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / "c", {at: like, "k": 0} if at else like)
    assert "is a dict in the checkpoint, a list in the template" in str(caught.value)
    assert "grow=" not in str(caught.value)


@pytest.mark.long
def test_parts_grow_next_to_nnx_modules(tmp_path: pathlib.Path) -> None:
    class Net(nnx.Module):
        def __init__(self, rows: int) -> None:
            self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(rows))
            self.rows = nnx.Variable(jnp.full((rows, 2), rows, jnp.float32))

    def init() -> Any:
        net = Net(0)
        return {"a": [], "net": net, "tied": net.linear.kernel, "z": {"h": ()}}

    net = Net(3)
    saved = {"a": [1.0, W], "net": net, "tied": net.linear.kernel, "z": {"h": (W, {"x": [2]})}}
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, saved)
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        grow = ["a", "net/rows", "z/**"]
        for found in (ckpts.restore_or_init(init, grow=grow)[0], ckpts.restore(init(), grow=grow)):
            assert_same([found["a"], found["z"]], [saved["a"], saved["z"]])
            assert found["net"].linear.kernel is found["tied"] and type(found["net"]) is Net
            assert_same(nnx.state(found["net"]).flat_state(), nnx.state(net).flat_state())


@pytest.mark.long
def test_parts_grow_at_their_places(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.P("x"))
    saved = {"buffer": jax.device_put(jnp.ones((16, 2)), rows), "new": [jax.device_put(jnp.arange(8.0), rows)], "w": W}

    def init() -> Any:
        return {"buffer": jax.device_put(jnp.zeros((0, 2)), rows), "new": [], "w": W}

    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, saved)
    with tr.Checkpointer(tmp_path / "run") as ckpts, caplog.at_level(logging.INFO):
        found, _ = ckpts.restore_or_init(init, grow=["buffer", "new"])
        assert_same(found, saved)
        assert found["buffer"].sharding == found["new"][0].sharding == rows
        assert "is called" not in caplog.text and "kind of leaf" not in caplog.text
        found = ckpts.restore(init(), grow=["buffer", "new"], sharding={"buffer": None, "new": rows, "w": None})
        assert found["new"][0].sharding == rows


@pytest.mark.parametrize("name", ["c.msgpack", "c.safetensors"])
def test_parts_grow_from_other_formats(tmp_path: pathlib.Path, name: str) -> None:
    saved = {"w": np.ones(3), "history": [np.ones(2), np.zeros(2)], "buffer": np.ones((4, 2))}
    tr.save(tmp_path / name, saved)
    template = {"w": np.zeros(3), "history": [], "buffer": np.zeros((0, 2))}
    with pytest.raises(MismatchError) as caught:
        tr.restore(tmp_path / name, template)
    assert_same(tr.restore(tmp_path / name, template, grow=advised(caught)), saved)
    renamed = [tr.rules.rename("^history", "h")]
    template["h"] = template.pop("history")
    found = tr.restore(tmp_path / name, template, rules=renamed, grow=["h", "buffer"])
    assert_same(found, {"w": saved["w"], "h": saved["history"], "buffer": saved["buffer"]})


def test_the_hints_take_time_in_proportion(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of layers that the template lacks are not compared with each other."""
    calls = collections.Counter[int]()

    def counted(path: str, base: str) -> str | None:
        calls[layers] += 1
        return relative_to(path, base)

    monkeypatch.setattr(grown_parts, "relative_to", counted)
    for layers in (50, 100):
        tr.save(tmp_path / str(layers), {"layers": [np.ones(1)] * layers})
        with pytest.raises(MismatchError, match=r"grow=\['layers'\]"):
            tr.restore(tmp_path / str(layers), {"layers": [np.ones(1)]})
    assert 0 < calls[100] < 2.5 * calls[50]
