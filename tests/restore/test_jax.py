"""Tests the private names of JAX that Treering uses: they exist, and without them results are the same or an error.

`restore/test_restore.py` tests how arrays are made.
"""

import collections
import contextlib
import dataclasses
import importlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import treering as tr
from helpers import assert_same
from jobs import run_job
from treering._processes import coordinator, preemption
from treering._pytree import jax_private, walk
from treering.errors import MismatchError, UnsupportedError

pytestmark = pytest.mark.compat

Point = collections.namedtuple("Point", "x y")


@jax.tree_util.register_pytree_node_class
class Unnamed:
    def __init__(self, *children: Any):
        self.children = children

    def tree_flatten(self) -> tuple[Any, None]:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Unnamed":
        return cls(*children)


@flax.struct.dataclass
class Struct:
    a: Any
    fixed: int = flax.struct.field(pytree_node=False, default=3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    a: Any
    b: Any


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = nn.with_partitioning(nn.initializers.ones, ("x", None))
        return nn.Dense(2, kernel_init=init)(nn.Dense(3)(x))


PARAMS = {"a": {"w": np.ones((2, 3), np.float32), "b": None}, "c": np.float32(0)}
# Made when needed, because every process of the test run imports this module and only one runs the tests.
TREES: dict[str, Callable[[], Any]] = {
    "containers": lambda: {
        "list": [1, [2], []],
        "tuple": (1, (), ({},)),
        "none": [None, {"a": None}],
        "point": Point(1, [2]),
    },
    "keys": lambda: {
        "ints": {2: 1, 10: {3: 4}},
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": {"q": 1},
    },
    "registered": lambda: [Unnamed(1, (2, 3), None), Unnamed(), Record([1], None), Struct({"a": 1}), Struct(5)],
    "a leaf": lambda: 3.5,
    "None": lambda: None,
    "nothing": lambda: {},
    "equinox": lambda: eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(0)),
    "optax": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(PARAMS),
    "linen": lambda: Net().init(jax.random.key(0), jnp.ones((1, 4))),
    "nnx": lambda: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
}


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("name", TREES)
def test_a_tree_has_the_same_names_by_the_public_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = TREES[name]()
    quick = walk._flatten_tree(tree)
    assert jax.tree_util.default_registry.flatten_one_level_with_keys({"a": 1}), "the quick way is there"
    monkeypatch.setattr(jax.tree_util, "default_registry", None)
    public = walk._flatten_tree(tree)
    assert public.paths == quick.paths and public.skeleton == quick.skeleton
    assert all(a is b or a == b for a, b in zip(public.leaves, quick.leaves, strict=True))
    assert list(map(id, public.leaves)) == list(map(id, walk.flatten_tree(tree).leaves))


def test_unsortable_keys_are_refused_without_private_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without JAX's private function, keys that cannot be sorted raise the same error."""
    monkeypatch.setattr(jax.tree_util, "default_registry", None)
    with pytest.raises(UnsupportedError, match="bad: JAX cannot flatten this dict"):
        walk.flatten_tree({"bad": {1: 2, "a": 3}})


@pytest.fixture
def no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the record of a job from the place where Treering looks for it. JAX's own modules still find it."""
    importlib.import_module("jax.experimental.multihost_utils")
    monkeypatch.delattr("jax._src.distributed")
    monkeypatch.setitem(sys.modules, "jax._src.distributed", None)  # type: ignore[arg-type]
    assert jax_private.job_state() is None


def test_what_jax_knows_of_a_job_is_where_it_was() -> None:
    assert jax_private.job_state() is not None


def test_a_process_alone_saves_with_any_jax(tmp_path: pathlib.Path, no_state: None) -> None:
    state = {"w": jnp.arange(3.0), "n": 1}
    tr.save(tmp_path / "a", state)
    with tr.Checkpointer(tmp_path / "run", save_on_preemption=True) as ckpts:
        ckpts.save(1, state)
    assert_same(tr.restore(tmp_path / "a", like=state), state)
    assert_same(tr.restore(tmp_path / "run", like=state), state)
    assert not coordinator.is_multi_process() and coordinator.process_index_and_count() == (0, 1)
    coordinator.forget_after_fork()


@pytest.mark.parametrize("hidden", [False, True])
def test_whether_there_is_a_preemption_service(
    hidden: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if hidden:
        request.getfixturevalue("no_state")
        preemption._check_service()  # only what JAX is asked for can be known
        monkeypatch.setattr(preemption.jax, "config", type("Config", (), {"jax_enable_preemption_service": False}))
    with pytest.raises(MismatchError, match="set jax_enable_preemption_service"):
        preemption._check_service()


@pytest.mark.long
def test_job_without_reachable_store_is_refused(tmp_path: pathlib.Path) -> None:
    """In a job of several processes the error says that this JAX lacks the key-value store."""
    body = """
import jax._src
del jax._src.distributed
sys.modules["jax._src.distributed"] = None
error = caught(tr.save, tmp / "together", {"x": 1})
tr.save(tmp / f"{INDEX}", {"x": INDEX}, processes="this")
report([error, tr.restore(tmp / f"{INDEX}")["x"]])
"""
    for index, result in enumerate(run_job(tmp_path, body, processes=2)):
        (kind, text), own = result.report
        assert kind == "UnsupportedError" and "expected the key-value store" in text and own == index
    assert not (tmp_path / "together").exists()


def test_keys_are_known_by_their_dtype_alone(tmp_path: pathlib.Path) -> None:
    """JAX does not name the implementation of a key for a shape with a dtype."""
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        key = jax.random.key(1, impl=impl)
        tr.save(tmp_path / impl, {"k": key})
        found = tr.restore(tmp_path / impl, like=jax.eval_shape(lambda key=key: {"k": key}))
        assert_same(found, {"k": key})
    with pytest.raises(MismatchError, match=r"k: expected key<unsafe_rbg>"):
        tr.restore(tmp_path / "rbg", like={"k": jax.ShapeDtypeStruct((), key.dtype)})


def test_weak_types_are_made_and_kept(tmp_path: pathlib.Path) -> None:
    """JAX has no public way to make an array of a weak type from bytes."""
    state = {"w": jnp.asarray(2.0) * 1, "x": np.float32(1)}
    assert state["w"].weak_type
    tr.save(tmp_path / "a", state)
    assert tr.restore(tmp_path / "a", like=state)["w"].weak_type


def guarded_trees() -> tuple[Any, Any]:
    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    rows = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), NamedSharding(mesh, PartitionSpec("x")))
    tree = {"rows": rows, "key": jax.random.key(1), "weak": jnp.asarray(1.0), "i4": jnp.arange(5, dtype=jnp.int4)}
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    return {**tree, "numpy": np.ones(3)}, {**like, "numpy": np.zeros(3)}


@pytest.mark.long
@pytest.mark.parametrize("everywhere", [False, True], ids=["in a block", "in the entire program"])
def test_transfers_that_a_save_or_a_restore_makes_are_asked_for(tmp_path: pathlib.Path, everywhere: bool) -> None:
    tree, like = guarded_trees()
    loss, other = jnp.float32(2) + 1, jax.tree.map(jnp.copy, tree["i4"])
    before = jax.config.jax_transfer_guard  # type: ignore
    with contextlib.ExitStack() as stack:
        if everywhere:
            jax.config.update("jax_transfer_guard", "disallow")
            stack.callback(jax.config.update, "jax_transfer_guard", before)
        else:
            stack.enter_context(jax.transfer_guard("disallow"))
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            jnp.add(np.ones(3), 1)  # the guard is at work
        tr.save(tmp_path / "c", tree, metrics={"loss": loss})
        tr.save_async(tmp_path / "d", {**tree, "i4": other}, memory_limit=10).result()
        assert not tr.diff(tmp_path / "c", tree) and not tr.diff(tmp_path / "c", tmp_path / "d")
        with tr.Checkpointer(tmp_path / "run") as ckpts:
            ckpts.save(1, tree, metrics={"loss": loss})
            ckpts.wait()
            assert ckpts.best_step("loss", "min") == 1
            found = [tr.restore(tmp_path / "c", tree), tr.restore(tmp_path / "d", like), ckpts.restore(tree)]
            key = tr.open(tmp_path / "c").restore()["key"]
            assert ckpts.restore_or_init(lambda: {"key": jax.random.key(1)}, extra="ignore")[1] == 1
    for one in found:
        assert_same(
            jax.tree.map(np.asarray, {**one, "key": jax.random.key_data(one["key"])}),
            jax.tree.map(np.asarray, {**tree, "key": jax.random.key_data(tree["key"])}),
        )
    assert (jax.random.key_data(key) == jax.random.key_data(tree["key"])).all()


def test_who_forbids_what_is_asked_for_as_well_is_obeyed(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"w": jnp.ones(3)})
    with jax.transfer_guard("disallow_explicit"), pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        tr.restore(tmp_path / "c", {"w": jax.ShapeDtypeStruct((3,), np.float32)})
