"""Tests of NNX Variables and Linen's partitioned parameters.

Orbax and Flax write these boxes around leaves as a path level of their own, which Treering's paths do not have.
"""

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.core import meta
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import treering as tr
from formats.test_later_versions import change
from helpers import assert_same
from treering import rules
from treering.errors import CorruptError, MismatchError


class Model(nnx.Module):
    """A model with parameters, batch statistics, a stream of keys, a list, and a Variable that holds a tree."""

    def __init__(self, seed: int = 0, depth: int = 12):
        rngs = nnx.Rngs(seed)
        self.dense = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        if depth:  # see `test_a_model_with_a_list`
            self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(depth)])
        self.cache = nnx.Cache({"k": jnp.full(3, seed + 1.0), "v": jnp.full(3, seed + 2.0)})


class Network(linen.Module):
    """A network with boxes of both kinds, and parameters without boxes."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        init = linen.initializers.normal()
        x = linen.Dense(8, kernel_init=linen.with_partitioning(init, (None, "x")))(x)
        x = linen.Dense(8, kernel_init=linen.with_logical_partitioning(init, ("in", "out")))(x)
        return linen.Dense(2)(x)


APPLY = Network().apply
CHAIN = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def network(seed: int) -> Any:
    return Network().init(jax.random.key(seed), jnp.ones((1, 4)))


def train_state(seed: int) -> TrainState:
    return TrainState.create(apply_fn=APPLY, params=network(seed)["params"], tx=CHAIN)


def optimizer(seed: int) -> nnx.Optimizer:
    return nnx.Optimizer(Model(seed), CHAIN, wrt=nnx.Param)


TREES: dict[str, Callable[[int], Any]] = {
    "state": lambda seed: nnx.state(Model(seed)),
    "model": lambda seed: Model(seed, depth=0),
    "parameters": lambda seed: nnx.state(Model(seed), nnx.Param),
    "filtered": lambda seed: nnx.state(Model(seed), nnx.Any(nnx.Param, nnx.BatchStat)),
    "split": lambda seed: nnx.split(Model(seed))[1],
    "optimizer": optimizer,
    "optimizer's state": lambda seed: nnx.state(optimizer(seed)),
    "both": lambda seed: {
        "model": nnx.state(Model(seed)),
        "optimizer": nnx.state(optimizer(seed)),
        "n": np.ones(3),
    },
    "pure": lambda seed: nnx.to_pure_dict(nnx.state(Model(seed))),
    "boxed": network,
    "train state": train_state,
    "optax": lambda seed: CHAIN.init({"w": jnp.full(3, seed)}),
    "empty": lambda seed: {"a": {}, "b": [], "c": (), "d": None, "e": np.full(2, seed), "f": optax.EmptyState()},
}


def written_by_orbax(path: pathlib.Path, tree: Any) -> pathlib.Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def read_by_orbax(path: pathlib.Path, like: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)


def bits(tree: Any) -> dict[str, Any]:
    """Returns the dtype, shape and bytes of each leaf, by its key path. Ignores other attributes, and devices."""
    tree = nnx.state(tree) if isinstance(tree, nnx.Pytree) else tree
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        typed = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if typed else leaf)
        found[jax.tree_util.keystr(path)] = (str(getattr(leaf, "dtype", type(leaf))), array.shape, array.tobytes())
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", TREES)
def test_what_orbax_wrote_fits_its_own_template(tmp_path: pathlib.Path, name: str) -> None:
    tree, like = TREES[name](0), TREES[name](1)
    path = written_by_orbax(tmp_path / "theirs", tree)
    assert bits(tr.restore(path, like)) == bits(tree)
    tr.convert(path, tmp_path / "ours")
    assert bits(tr.restore(tmp_path / "ours", like)) == bits(tree)
    for found in (tr.diff(path, tree), tr.diff(tree, path)):
        lone = {*found.only_a, *found.only_b}  # Orbax stores an empty container as None.
        assert not found.changed and found.equal > 0 and all(tr.open(path)[name] is None for name in lone)


@pytest.mark.long
def test_a_model_with_a_list(tmp_path: pathlib.Path) -> None:
    """A saved NNX model with a list can be restored. The list has numbers and an attribute as keys.

    Orbax itself cannot read such a checkpoint, because it sorts keys of both types.
    """
    model, like = Model(0), Model(1)
    path = written_by_orbax(tmp_path / "theirs", model)
    with pytest.raises(TypeError, match="not supported between instances of 'str' and 'int'"):
        read_by_orbax(path, Model(1))
    assert list(tr.restore(path, at="layers")) == [*map(str, range(12)), "_pytree__state"]
    assert bits(tr.restore(path, like)) == bits(model)
    assert bits(tr.restore(path, nnx.state(like))) == bits(model)
    assert_same(tr.restore(path, nnx.state(like.layers[10]), at="layers/10"), nnx.state(model.layers[10]))
    tr.convert(path, tmp_path / "ours")
    assert bits(tr.restore(tmp_path / "ours", like)) == bits(model)
    assert not tr.diff(path, model).changed
    some = nnx.List([3, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Param(jnp.ones(2))])  # NNX does not save the number.
    path = written_by_orbax(tmp_path / "some", {"l": some, "w": np.ones(3)})
    found = tr.restore(path, {"l": nnx.List([4, nnx.Linear(2, 2, rngs=nnx.Rngs(1)), some[2]]), "w": np.ones(3)})
    assert bits(found["l"]) == bits(some) and found["l"][0] == 4
    path = tmp_path / "theirs"
    about = json.loads((path / "_METADATA").read_text())
    for one in about["tree_metadata"].values():  # Gives an attribute the name of a number.
        if [key["key"] for key in one["key_metadata"]][:2] == ["layers", "3"]:
            one["key_metadata"][1] = {"key": "4", "key_type": 2}
    (path / "_METADATA").write_text(json.dumps(about))
    with pytest.raises(CorruptError, match=r"layers\.4"):
        tr.open(path)


@pytest.mark.parametrize("name", ["list", "sequential", "among others"])
def test_orbax_restores_the_state_of_a_model_with_a_list(tmp_path: pathlib.Path, name: str) -> None:
    """Orbax cannot restore into such a model, but into its state, which NNX puts into the model."""

    def tree(seed: int) -> Any:
        rngs = nnx.Rngs(seed)
        chain = nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs))
        return {"list": Model(seed), "sequential": chain, "among others": {"model": chain, "n": np.full(2, seed)}}[name]

    saved, other = tree(0), tree(1)
    tr.save(tmp_path / "ours", saved, format="orbax")
    like = {**other, "model": nnx.state(other["model"])} if isinstance(other, dict) else nnx.state(other)
    found = read_by_orbax(tmp_path / "ours", like)
    want = {**saved, "model": nnx.state(saved["model"])} if isinstance(saved, dict) else nnx.state(saved)
    assert bits(found) == bits(want)
    model, state = (other["model"], found["model"]) if isinstance(other, dict) else (other, found)
    nnx.update(model, state)
    assert bits(model) == bits(saved["model"] if isinstance(saved, dict) else saved)
    assert bits(tr.restore(tmp_path / "ours", tree(2))) == bits(saved)


@pytest.mark.long
@pytest.mark.parametrize("name", TREES)
def test_what_is_written_fits_orbaxs_template(tmp_path: pathlib.Path, name: str) -> None:
    tree, like = TREES[name](0), TREES[name](1)
    tr.save(tmp_path / "ours", tree, format="orbax")
    assert bits(read_by_orbax(tmp_path / "ours", like)) == bits(tree) == bits(tr.restore(tmp_path / "ours", like))
    theirs = written_by_orbax(tmp_path / "theirs", tree)
    ours, expected = (json.loads((path / "_METADATA").read_text()) for path in (tmp_path / "ours", theirs))
    for about in (ours, expected):
        for one in about["tree_metadata"].values():
            one["value_metadata"].pop("write_shape", None)
    assert ours["tree_metadata"] == expected["tree_metadata"]


def as_state(tree: Any) -> Any:
    return nnx.state(tree) if isinstance(tree, nnx.Pytree) else tree


@pytest.mark.parametrize("name", [name for name in TREES if name != "empty"])
def test_what_is_converted_fits_orbaxs_template(tmp_path: pathlib.Path, name: str) -> None:
    tree, like = TREES[name](0), as_state(TREES[name](1))
    tr.save(tmp_path / "native", tree)
    tr.convert(tmp_path / "native", tmp_path / "again")  # The native format keeps the record of boxes.
    tr.convert(tmp_path / "again", tmp_path / "theirs", format="orbax")
    assert bits(read_by_orbax(tmp_path / "theirs", like)) == bits(tree)


def test_parts_that_are_converted_keep_the_levels(tmp_path: pathlib.Path) -> None:
    state = nnx.state(Model(0))
    tr.save(tmp_path / "native", {"ema": {"model": state}, "boxed": network(0), "n": 3})
    for at, like in (("ema/model", state), ("ema", {"model": state}), ("boxed", network(1))):
        path = tmp_path / at.replace("/", "-")
        tr.convert(tmp_path / "native", path, format="orbax", at=at)
        assert bits(read_by_orbax(path, like)) == bits(tr.restore(tmp_path / "native", like, at=at))
    moved = [rules.rename("^ema/model/", "weights/"), rules.drop("boxed/**"), rules.drop("n")]
    tr.convert(tmp_path / "native", tmp_path / "moved", format="orbax", rules=moved)
    assert bits(read_by_orbax(tmp_path / "moved", {"weights": state}))["['weights']['dense']['kernel'].value"]
    tr.save(tmp_path / "merged", {"a": tr.open(tmp_path / "native").at("ema"), "b": nnx.Param(jnp.ones(2))})
    tr.convert(tmp_path / "merged", tmp_path / "all", format="orbax")
    like = {"a": {"model": state}, "b": nnx.Param(jnp.zeros(2))}
    assert bits(read_by_orbax(tmp_path / "all", like)["a"]["model"]) == bits(state)
    away = [rules.rename("^ema/model/cache/k$", "k"), rules.drop("n")]
    tr.convert(tmp_path / "native", tmp_path / "away", format="orbax", rules=away)
    names = set(tr.open(tmp_path / "away"))  # A box does not follow a part of its contents.
    assert {"k", "ema/model/dense/kernel/value"} <= names and not any(name.startswith("value") for name in names)


BAD_RECORDS: dict[str, Any] = {
    "a list": [],
    "a kind that is not listed": {"kinds": [], "nodes": [[3, 5]]},
    "fewer nodes": {"kinds": [[["variable", "value"]]], "nodes": [[1, 0]]},
    "many nodes": {"kinds": [[["variable", "value"]]], "nodes": [[1 << 53, 0]]},
    "a run of no node": {"kinds": [[["variable", "value"]]], "nodes": [[0, 0], [3, 0]]},
    "another shape": {"kinds": [["variable"]], "nodes": [[3, 0]]},
}


@pytest.mark.parametrize("case", [*BAD_RECORDS, "none"])
def test_a_record_of_boxes_that_is_not_understood(tmp_path: pathlib.Path, case: str) -> None:
    """Older checkpoints have no record of boxes, and one of another form is ignored."""
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    tr.save(tmp_path / "a", state)
    change(
        tmp_path / "a" / "treering.json",
        lambda m: m.pop("boxes") and None if case == "none" else m.update(boxes=BAD_RECORDS[case]),
    )
    assert_same(tr.restore(tmp_path / "a", state), state)
    tr.convert(tmp_path / "a", tmp_path / "b", format="orbax")
    assert set(tr.open(tmp_path / "b")) == {"bias", "kernel"}


@pytest.mark.parametrize("name", ["boxed", "train state"])
@pytest.mark.parametrize("format", ["flax", "fjformer", "t5x"])
@pytest.mark.long
def test_flax_and_its_relatives(tmp_path: pathlib.Path, name: str, format: str) -> None:
    tree, like = TREES[name](0), TREES[name](1)
    path = tmp_path / "theirs.msgpack"
    path.write_bytes(flax.serialization.to_bytes(tree))
    assert_same(tr.restore(path, like), tree)
    tr.save(tmp_path / "ours", tree, format=format)
    assert_same(tr.restore(tmp_path / "ours", like), tree)
    if format == "flax":
        assert bits(flax.serialization.from_bytes(like, (tmp_path / "ours").read_bytes())) == bits(tree)
    assert set(tr.open(tmp_path / "ours")) == set(tr.open(path))


@pytest.mark.long
def test_shapes_with_shardings_are_templates(tmp_path: pathlib.Path) -> None:
    mesh = jax.make_mesh((8,), ("x",))
    where = NamedSharding(mesh, PartitionSpec())
    path = written_by_orbax(tmp_path / "theirs", nnx.state(Model(0)))
    abstract = nnx.eval_shape(lambda: nnx.state(Model(1)))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), abstract)
    found = tr.restore(path, like)
    assert all(leaf.sharding == where for leaf in jax.tree.leaves(found))
    assert_same(tr.restore(path, abstract), nnx.state(Model(0)))
    assert_same(tr.restore(path, nnx.state(Model(1).dense), at="dense"), nnx.state(Model(0).dense))


@pytest.mark.slow
def test_rules_and_parts_keep_the_levels(tmp_path: pathlib.Path) -> None:
    model, like = nnx.state(Model(0)), nnx.state(Model(1))
    moved = [rules.rename("^dense/", "first/"), rules.drop("drop/**"), rules.cast("norm/*", "float16")]
    tr.save(tmp_path / "ours", model, format="orbax", rules=moved)
    names = set(tr.open(tmp_path / "ours"))
    assert {"first/kernel/value", "norm/scale/value", "cache/value/k"} <= names and "dense/kernel/value" not in names
    back = [rules.rename("^first/", "dense/")]
    found = tr.restore(tmp_path / "ours", like, rules=back, missing=["drop/**"])
    assert_same(found["dense"], model["dense"])
    assert_same(found["cache"], model["cache"])


@pytest.mark.long
def test_other_formats_do_not_show_them(tmp_path: pathlib.Path) -> None:
    params = nnx.state(Model(0), nnx.Param)
    for format in ("treering", "safetensors", "levanter", "flax"):
        tr.save(tmp_path / format, params, format=format)
        assert "dense/kernel" in tr.open(tmp_path / format)
        assert_same(tr.restore(tmp_path / format, nnx.state(Model(1), nnx.Param)), params)


@pytest.mark.long
def test_a_run_that_orbax_began_goes_on(tmp_path: pathlib.Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave(nnx.state(optimizer(0))))
    with tr.Checkpointer(tmp_path) as ckpts:
        state, step = ckpts.restore_or_init(lambda: optimizer(1))
        assert step == 3
        assert_same(nnx.state(state), nnx.state(optimizer(0)))
        ckpts.save(4, state)
    assert_same(nnx.state(tr.restore(tmp_path, optimizer(1))), nnx.state(optimizer(0)))


@pytest.mark.long
def test_what_is_really_missing_is_named_as_here(tmp_path: pathlib.Path) -> None:
    path = written_by_orbax(tmp_path / "theirs", nnx.state(Model(0).dense))
    with pytest.raises(MismatchError, match=r"2 differences\n  kernel: expected.*\n  scale: .*found nothing"):
        tr.restore(
            path, {**nnx.state(Model(1).dense), "scale": nnx.Param(jnp.ones(2)), "kernel": nnx.Param(jnp.ones(3))}
        )


BOXED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a level more": (lambda dense: dense["params"], "at='params'"),
    "a level less": (lambda dense: {"model": dense}, "rename('^', 'model/')"),
    "another name": (lambda dense: {"params": {"other": dense["params"]["dense"]}}, "rename('^params/dense/', "),
    "no boxes": (nnx.to_pure_dict, "it looks like Flax NNX or partitioned Linen"),
}


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("case", BOXED)
def test_what_an_error_suggests_works_where_boxes_are_levels(tmp_path: pathlib.Path, case: str) -> None:
    def of(seed: int) -> Any:
        return nnx.State({"params": {"dense": nnx.state(Model(seed, depth=0).dense)}})

    path = written_by_orbax(tmp_path / "theirs", of(0))
    change, words = BOXED[case]
    with pytest.raises(MismatchError, match="likely: ") as caught:
        tr.restore(path, change(of(1)))
    line = str(caught.value).splitlines()[1]
    assert words in line
    arguments = re.split(r": (?=(?:at|rules|missing|extra|dtype)=)", line, maxsplit=1)[1]
    found = tr.restore(path, change(of(1)), **eval(f"dict({arguments})", {"tr": tr}))
    assert_same(jax.tree.leaves(found), jax.tree.leaves(change(of(0))))


def test_a_box_with_a_name_of_its_own(tmp_path: pathlib.Path) -> None:
    @flax.struct.dataclass
    class Box(meta.AxisMetadata):
        inner: Any

        def unbox(self) -> Any:
            return self.inner

        def replace_boxed(self, val: Any) -> Any:
            return Box(val)

        def add_axis(self, index: Any, params: Any) -> Any:
            return self

        def remove_axis(self, index: Any, params: Any) -> Any:
            return self

    tree, like = {"w": Box(jnp.ones(3))}, {"w": Box(jnp.zeros(3))}
    path = written_by_orbax(tmp_path / "theirs", tree)
    assert list(tr.open(path)) == ["w/inner"]
    assert_same(tr.restore(path, like), tree)
    tr.save(tmp_path / "ours", tree, format="orbax")
    assert bits(read_by_orbax(tmp_path / "ours", like)) == bits(tree)


@pytest.mark.long
def test_keys_that_are_called_like_a_level(tmp_path: pathlib.Path) -> None:
    def state(seed: float) -> Any:
        inner = {"a": jnp.full(2, seed), "value": {"a": jnp.full(2, seed + 1)}}
        return nnx.State({"p": nnx.Param(inner), "value": nnx.Param(jnp.full(2, seed + 2))})

    for format in ("orbax", "treering"):
        tr.save(tmp_path / format, state(0), format=format)
        assert_same(tr.restore(tmp_path / format, state(9)), state(0))
    assert_same(tr.restore(written_by_orbax(tmp_path / "theirs", state(0)), state(9)), state(0))


@pytest.mark.long
def test_one_variable_in_two_places(tmp_path: pathlib.Path) -> None:
    """A variable that occurs twice in a tree is stored twice by Orbax. A template restores it under its first name."""
    shared = nnx.Param(jnp.ones(3))
    path = written_by_orbax(tmp_path / "theirs", {"a": shared, "b": shared})
    like = nnx.Param(jnp.zeros(3))
    found = tr.restore(path, {"a": like, "b": like}, extra=["b/value"])
    assert found["a"] is found["b"] and (found["a"][...] == 1).all()
