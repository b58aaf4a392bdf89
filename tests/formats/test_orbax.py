"""Treering reads the checkpoints that Orbax writes, and Orbax reads those that Treering writes."""

import base64
import collections
import datetime
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax import serialization
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.experimental import v1 as ocp1

import treering as tr
from helpers import assert_same
from hostile_input import outcome, shuffled
from treering import formats, rules, stores
from treering.errors import CorruptError, MismatchError, NotFoundError, UnsafeError, UnsupportedError
from treering.testing._doubles import CountingDisk

# The warnings come from Orbax, and from event loops that it leaves open.
pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::pytest.PytestWarning"),
]

NT = collections.namedtuple("NT", "a b")
LAYOUTS = [(True, False), (False, False), (True, True), (False, True)]  # OCDBT? zarr 3?


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


def state() -> dict[str, Any]:
    """Returns a tree of everything that all of Orbax's checkpointers accept."""
    spread = NamedSharding(mesh(), PartitionSpec("x", "y"))
    return {
        "w": jax.device_put(jnp.arange(32.0).reshape(8, 4), spread),
        "b": np.arange(3),
        "nan": np.array([0x7FC00001, 0xFF800001, 0x80000000], np.uint32).view(np.float32),
        "step": 3,
        "rate": 1.5,
        "on": True,
        "none": None,
        "dict": {},
        "list": [1, jnp.ones(2), []],
        "tuple": (np.zeros((), np.float16), ()),
        "named": NT(jnp.zeros(2), -(2**40)),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "bf": jnp.ones(3, jnp.bfloat16),
        "i4": jnp.arange(-3, 3, dtype=jnp.int4),
        "f8": np.arange(4).astype(jnp.float8_e4m3fn),
        "c": np.array([1 + 2j]),
        "od.d": {"a/b": np.ones(1), "~": np.ones(2), "ü": np.ones(3)},
    }


def plain(tree: Any) -> Any:
    """Returns a tree as Orbax restores it without a template, on the host: no tuples, no classes."""
    if isinstance(tree, optax.EmptyState):
        return None
    if hasattr(tree, "_fields"):
        return {name: plain(getattr(tree, name)) for name in tree._fields}
    if isinstance(tree, dict):
        return {str(key): plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and tree:
        return [plain(value) for value in tree]
    if isinstance(tree, jax.Array) and not jnp.issubdtype(tree.dtype, jax.dtypes.prng_key):
        return np.asarray(tree)
    return tree


def bits(tree: Any) -> Any:
    """Returns a tree with all its arrays on the host, because Orbax places and commits arrays its own way."""

    def on_host(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)

    return jax.tree.map(on_host, tree)


def save(path: Path, tree: Any, *, ocdbt: bool = True, zarr3: bool = False) -> Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)) as checkpointer:
        checkpointer.save(path, tree)
    return path


def save_standard(path: Path, tree: Any) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
    return path


def restore_standard(path: Path, target: Any = None) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path) if target is None else checkpointer.restore(path, target)


@pytest.mark.long
@pytest.mark.parametrize(("ocdbt", "zarr3"), LAYOUTS)
def test_every_layout(tmp_path: Path, ocdbt: bool, zarr3: bool) -> None:
    tree = {**state(), "text": "täxt", "empty": ""}
    path = save(tmp_path / "ckpt", tree, ocdbt=ocdbt, zarr3=zarr3)
    ckpt = tr.open(path)
    assert (ckpt.format, ckpt.step, ckpt.metrics, ckpt.metadata) == ("orbax", None, {}, None)
    assert ckpt.nbytes == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    found = tr.restore(path)
    expected = plain(tree)
    assert list(found) == sorted(expected)
    assert_same(found, expected)
    assert_same(tr.restore(path, like=tree), tree)
    assert_same(tr.restore(path, like={"list": tree["list"]}, extra="ignore")["list"], tree["list"])
    assert_same(tr.restore(path, like=tree["od.d"], at="od.d"), tree["od.d"])
    assert (ckpt["w"][2:5, 1] == np.asarray(tree["w"])[2:5, 1]).all()
    tr.save(tmp_path / "native", ckpt)
    assert_same(tr.restore(tmp_path / "native"), expected)


@pytest.mark.long
def test_with_and_without_the_devices_it_was_saved_on(tmp_path: Path) -> None:
    tree = state()
    path = save_standard(tmp_path / "ckpt", tree)
    ckpt = tr.open(path)
    assert ckpt["w"].sharding.spec == PartitionSpec("x", "y") and ckpt["w"].sharding.mesh.shape == {"x": 4, "y": 2}
    assert ckpt["b"].sharding is None and ckpt["bf"].sharding is None
    listed = json.loads((path / "_sharding").read_text())
    for spec in (PartitionSpec("y"), PartitionSpec(None, ("x", "y")), PartitionSpec()):
        where = (
            NamedSharding(mesh(), spec)
            if spec != PartitionSpec(None, ("x", "y"))
            else NamedSharding(mesh(), PartitionSpec(("x", "y")))
        )
        like = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=where)
        found = tr.restore(path, like={"w": like}, extra="ignore")["w"]
        assert found.sharding == where and (np.asarray(found) == np.asarray(tree["w"])).all()
    larger_mesh = {"sharding_type": "NamedSharding", "shape": [64, 64], "axis_names": ["data", "model"]}
    larger_mesh["partition_spec"] = [["data", "model"], None]
    for text in (json.dumps(larger_mesh), "no JSON", json.dumps({"sharding_type": "NamedSharding"}), json.dumps([1])):
        listed[base64.urlsafe_b64encode(b"w").decode()] = text
        (path / "_sharding").write_text(json.dumps(listed))
        there = tr.open(path)["w"].sharding
        assert (there and there.spec) == (
            PartitionSpec(("data", "model"), None) if text[0] == "{" and "64" in text else None
        )
        assert_same(tr.restore(path), plain(tree))
    (path / "_sharding").unlink()
    assert_same(tr.restore(path), plain(tree))
    assert tr.open(path)["w"].sharding is None


def test_optimizer_states(tmp_path: Path) -> None:
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    optimizer = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    tree = {"params": params, "opt": optimizer.init(params), "step": 7}
    path = save_standard(tmp_path / "theirs", tree)
    assert_same(tr.restore(path, like=tree), tree)
    tr.save(tmp_path / "ours", tree, format="orbax")
    assert_same(bits(restore_standard(tmp_path / "ours", tree)), bits(tree))
    assert_same(tr.restore(tmp_path / "ours", like=tree), tree)


def manager(path: Path, **options: Any) -> ocp.CheckpointManager:
    items = options.pop("item_names", None)
    return ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(**options), item_names=items)


def test_a_run_of_a_manager(tmp_path: Path) -> None:
    config = {"rate": 0.1, "layers": [1, None, {"x": "y"}, []], "nan": math.nan, "big": 2**80, "": {}, "a/b": True}
    with manager(tmp_path / "run", best_fn=lambda m: m["loss"], item_names=("state", "config", "unused")) as run:
        for step in (0, 5, 10):
            args = ocp.args.Composite(
                state=ocp.args.StandardSave({"w": np.full(3, step)}), config=ocp.args.JsonSave(config)
            )
            run.save(step, args=args, metrics={"loss": step / 2, "nan": math.nan}, custom_metadata={"by": ["me"]})
        run.wait_until_finished()
    assert tr.steps(tmp_path / "run") == [0, 5, 10]
    for step in (0, 5, 10):
        ckpt = tr.open(tmp_path / "run", step=step)
        assert ckpt.step == step and ckpt.metrics["loss"] == step / 2 and math.isnan(ckpt.metrics["nan"])
        assert ckpt.metadata == {"by": ["me"]}
        assert_same(ckpt.restore(), {"config": config, "state": {"w": np.full(3, step)}})
    assert tr.restore(tmp_path / "run", at="state")["w"][0] == 10
    assert tr.open(tmp_path / "run" / "5" / "state")["w"][0] == 5
    assert tr.open(tmp_path / "run" / "5").step == 5
    with pytest.raises(NotFoundError, match="step 7"):
        tr.open(tmp_path / "run", step=7)


@pytest.mark.parametrize("legacy", [False, True])
def test_the_metadata_of_a_run_is_that_of_its_steps(tmp_path: Path, caplog: Any, legacy: bool) -> None:
    path, of_run = tmp_path / "run", {"env": {"name": "ant"}, "version": 1.0}
    with ocp.CheckpointManager(path, metadata=None if legacy else of_run) as run:
        run.save(1, args=ocp.args.StandardSave({"w": np.ones(3)}))
        run.save(2, args=ocp.args.StandardSave({"w": np.ones(3)}), custom_metadata={"version": 2, "by": "me"})
        run.wait_until_finished()
    if legacy:  # as managers did before the file had its own name
        shutil.rmtree(path / "metadata", ignore_errors=True)
        ocp.Checkpointer(ocp.JsonCheckpointHandler()).save(path / "metadata", of_run)
    assert tr.steps(path) == [1, 2]
    assert tr.open(path, step=1).metadata == of_run
    assert tr.open(path).metadata == {"env": {"name": "ant"}, "version": 2, "by": "me"}
    assert tr.open(path / "1" / "default").metadata is None
    tr.convert(path / "1", tmp_path / "ours")
    assert tr.open(tmp_path / "ours").metadata == of_run
    file = path / "metadata" / ("metadata" if legacy else "_ROOT_METADATA")
    file.write_text("{")
    assert tr.open(path, step=1).metadata is None and tr.open(path).metadata == {"version": 2, "by": "me"}
    assert f"opened without the metadata of the run: {file}: expected JSON" in caplog.text
    file.unlink()
    assert tr.open(path, step=1).metadata is None


def test_values_in_json_right_in_a_folder(tmp_path: Path) -> None:
    values = {"a": [1, None], "b": {"c": "d"}}
    ocp.Checkpointer(ocp.JsonCheckpointHandler()).save(tmp_path / "values", values)
    assert tr.restore(tmp_path / "values") == values


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["0", "12"]),
        ({"step_prefix": "ck"}, ["ck_0", "ck_12"]),
        ({"step_format_fixed_length": 4}, ["0000", "0012"]),
    ],
)
def test_names_of_steps_and_the_item_without_a_name(tmp_path: Path, options: Any, names: list[str]) -> None:
    tree = {"w": np.ones(3), "metrics": {"x": np.ones(1)}}
    with manager(tmp_path, **options) as run:
        for step in (0, 12):
            run.save(step, args=ocp.args.StandardSave(tree))
        run.wait_until_finished()
    assert tr.steps(tmp_path) == [0, 12]
    for name in names:
        assert_same(tr.restore(tmp_path / name), tree)
    shutil.copytree(tmp_path / names[1], tmp_path / "other_7")  # another run, which the test does not open
    assert tr.steps(tmp_path) == ([0, 12] if names[0].isdigit() else [])
    shutil.copytree(tmp_path / names[1] / "default", tmp_path / names[1] / "second")
    assert_same(tr.restore(tmp_path / names[1]), {"default": tree, "second": tree})


@pytest.mark.long
@pytest.mark.whole
def test_steps_that_were_never_finished(tmp_path: Path) -> None:
    with manager(tmp_path) as run:
        for step in (1, 2, 3, 4):
            run.save(step, args=ocp.args.StandardSave({"w": np.ones(3)}))
        run.wait_until_finished()
    (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")
    (tmp_path / "2.orbax-checkpoint-tmp" / "commit_success.txt").unlink()
    about = json.loads((tmp_path / "4" / "_CHECKPOINT_METADATA").read_text())
    about["commit_timestamp_nsecs"] = None  # as in a bucket, where folders cannot be renamed
    (tmp_path / "4" / "_CHECKPOINT_METADATA").write_text(json.dumps(about))
    (tmp_path / "4" / "commit_success.txt").unlink()
    (tmp_path / "5").mkdir()
    assert tr.steps(tmp_path) == [1, 3]
    assert tr.open(tmp_path).step == 3
    for name, why in (("2.orbax-checkpoint-tmp", "never finished"), ("4", "never committed"), ("5", "without")):
        with pytest.raises(NotFoundError, match=why):
            tr.open(tmp_path / name)
    (tmp_path / "1" / "state.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "1" / "commit_success.txt").unlink()  # earlier releases did not write it
    assert_same(tr.restore(tmp_path / "1"), {"w": np.ones(3)})


def test_when_a_step_was_committed(tmp_path: Path) -> None:
    begun = datetime.datetime.now(datetime.UTC)
    with manager(tmp_path) as run:
        run.save(1, args=ocp.args.StandardSave({"w": np.ones(3)}))
        run.wait_until_finished()
    created = tr.open(tmp_path).created
    assert created and begun <= created <= datetime.datetime.now(datetime.UTC)
    assert created.utcoffset() == datetime.timedelta(0)
    file = tmp_path / "1" / "_CHECKPOINT_METADATA"
    for moment in (10**30, "now", True, -1):
        file.write_text(json.dumps({**json.loads(file.read_text()), "commit_timestamp_nsecs": moment}))
        assert tr.open(tmp_path / "1").created is None


def test_steps_of_earlier_releases(tmp_path: Path) -> None:
    save(tmp_path / "7" / "default", {"w": np.ones(3)})
    save(tmp_path / "8" / "params", {"w": np.ones(2)})
    save(tmp_path / "8" / "opt", {"m": np.ones(2)})
    save(tmp_path / "9", {"w": np.ones(1)})
    for name in ("7/default", "8/params", "8/opt", "9"):
        for file in ("_CHECKPOINT_METADATA", "commit_success.txt"):
            (tmp_path / name / file).unlink()
    assert tr.steps(tmp_path) == [7, 8, 9]
    assert_same(tr.restore(tmp_path, step=7), {"w": np.ones(3)})
    assert_same(tr.restore(tmp_path, step=8), {"opt": {"m": np.ones(2)}, "params": {"w": np.ones(2)}})
    assert_same(tr.restore(tmp_path), {"w": np.ones(1)})


@pytest.mark.long
def test_version_1(tmp_path: Path) -> None:
    tree = {"w": jnp.ones(3), "s": "x", "n": None, "t": (1, 2.5, True, {}), "k": jax.random.key(1)}
    ocp1.save(tmp_path / "one", tree, custom_metadata={"q": 1})
    ckpt = tr.open(tmp_path / "one")
    assert ckpt.metadata == {"q": 1}
    assert_same(ckpt.restore(), plain(tree))
    assert_same(ckpt.restore(tree), tree)
    ocp1.save(tmp_path / "bare", jnp.arange(5))
    assert_same(tr.restore(tmp_path / "bare"), np.arange(5, dtype=np.int32))
    ocp1.save_checkpointables(tmp_path / "items", {"state": {"w": np.ones(3)}, "config": {"a": ["x", 1]}})
    assert_same(tr.restore(tmp_path / "items"), {"state": {"w": np.ones(3)}, "config": {"a": ["x", 1]}})
    with ocp1.training.Checkpointer(tmp_path / "run") as run:
        run.save(0, {"w": np.ones(3)}, metrics={"loss": 1.0})
        run.save_checkpointables(4, {"state": {"w": np.ones(4)}, "more": {"a": 1}})
    assert tr.steps(tmp_path / "run") == [0, 4]
    assert tr.open(tmp_path / "run", step=0).metrics == {"loss": 1.0}
    assert_same(tr.restore(tmp_path / "run", step=0), {"w": np.ones(3)})
    assert_same(tr.restore(tmp_path / "run"), {"more": {"a": 1}, "state": {"w": np.ones(4)}})
    (tmp_path / "run" / "4" / "_CHECKPOINT_DELETION").write_text(json.dumps({"checkpointable_name": "more"}))
    assert_same(tr.restore(tmp_path / "run"), {"w": np.ones(4)})


def test_items_of_other_kinds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    handlers = {"key": ocp.JaxRandomKeyCheckpointHandler(), "array": ocp.ArrayCheckpointHandler()}
    with ocp.CheckpointManager(tmp_path, item_names=("key", "array"), item_handlers=handlers) as run:
        args = ocp.args.Composite(
            key=ocp.args.JaxRandomKeySave(jax.random.key(3)), array=ocp.args.ArraySave(jnp.arange(3))
        )
        run.save(0, args=args)
        run.wait_until_finished()
    found = tr.restore(tmp_path)
    assert_same(found["array"], np.arange(3, dtype=np.int32))
    assert found["key"] == jax.random.key(3) and list(tr.open(tmp_path)) == ["array", "key"]
    (tmp_path / "0" / "data").mkdir()
    (tmp_path / "0" / "data" / "process_0.bin").write_bytes(b"?")
    assert "data" not in tr.restore(tmp_path) and "left out" in caplog.text and "data" in caplog.text
    shutil.rmtree(tmp_path / "0" / "array")
    with pytest.raises(CorruptError, match="the item 'array', found no folder"):
        tr.restore(tmp_path / "0")
    (tmp_path / "0" / "_CHECKPOINT_METADATA").unlink()
    shutil.rmtree(tmp_path / "0" / "key")
    with pytest.raises(NotFoundError):
        tr.open(tmp_path / "0")


@pytest.mark.long
def test_items_that_are_arrays_and_keys(tmp_path: Path) -> None:
    keys = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(1), 4), "raw": jax.random.PRNGKey(5)}
    with ocp.CheckpointManager(tmp_path / "run") as run:
        saved = {name: ocp.args.JaxRandomKeySave(key) for name, key in keys.items()}
        tree = ocp.args.StandardSave({"checkpoint": jnp.ones(2)})
        run.save(0, args=ocp.args.Composite(**saved, array=ocp.args.ArraySave(jnp.arange(3)), tree=tree))
    found = tr.restore(tmp_path / "run", {**keys, "array": jnp.zeros(3, int), "tree": {"checkpoint": jnp.zeros(2)}})
    assert all((found[name] == key).all() for name, key in keys.items())
    assert found["array"].tolist() == [0, 1, 2] and found["tree"]["checkpoint"].tolist() == [1, 1]
    tr.convert(tmp_path / "run", tmp_path / "copy")
    assert not tr.diff(tmp_path / "run", tmp_path / "copy")
    with jax.default_prng_impl("rbg"), ocp.CheckpointManager(tmp_path / "other") as run:
        run.save(0, args=ocp.args.Composite(key=ocp.args.JaxRandomKeySave(jax.random.key(3))))
    parts = tr.restore(tmp_path / "other")["key"]  # two kinds of keys have this size
    assert_same(parts["jax_random_key"]["checkpoint"], np.array([0, 3, 0, 3], np.uint32))
    with ocp.CheckpointManager(tmp_path / "lone") as run:
        run.save(0, args=ocp.args.ArraySave(jnp.arange(3)))
    assert_same(tr.restore(tmp_path / "lone"), np.arange(3, dtype=np.int32))


@pytest.mark.parametrize("ocdbt", [True, False])
def test_the_first_releases(tmp_path: Path, ocdbt: bool) -> None:
    arrays = {"params.w": np.arange(6.0).reshape(2, 3), "params.b": np.ones(3, np.float32)}
    inline = {"step": 5, "none": None, "small": np.arange(2)}
    tree = {"params": {name.split(".")[1]: f"PLACEHOLDER://{name}" for name in arrays}, **inline}
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "checkpoint").write_bytes(serialization.msgpack_serialize(tree))
    for name, array in arrays.items():
        files = {"driver": "file", "path": f"{tmp_path}/ckpt/"}
        kvstore = (
            {"driver": "ocdbt", "base": files, "path": name} if ocdbt else {**files, "path": f"{files['path']}{name}"}
        )
        where = {"driver": "zarr", "kvstore": kvstore, "metadata": {"shape": array.shape, "chunks": array.shape}}
        ts.open(where, create=True, dtype=array.dtype).result().write(array).result()
    assert tr.open(tmp_path / "ckpt").format == "orbax"
    found = tr.restore(tmp_path / "ckpt")
    assert_same(found, {"params": {"w": arrays["params.w"], "b": arrays["params.b"]}, **inline})
    with ocp.PyTreeCheckpointer() as theirs:
        assert_same(bits(theirs.restore(tmp_path / "ckpt")), found)
    tree["params"]["w"] = "PLACEHOLDER://../outside"
    (tmp_path / "ckpt" / "checkpoint").write_bytes(serialization.msgpack_serialize(tree))
    with pytest.raises(CorruptError if ocdbt else UnsafeError, match="outside"):
        tr.restore(tmp_path / "ckpt")


@pytest.mark.long
def test_what_is_written_orbax_reads(tmp_path: Path) -> None:
    tree = {
        **state(),
        "text": "täxt",
        "none at all": np.zeros((0, 3)),
        "big": 2**63,
        "deep": {"er": [{"x": [[np.ones(1)]]}]},
    }
    tr.save(tmp_path / "ckpt", tree, format="orbax", metrics={"loss": math.inf}, metadata={"a": [1]})
    expected = bits(plain(tree))
    assert_same(bits(restore_standard(tmp_path / "ckpt")), expected)
    assert_same(bits(ocp1.load(tmp_path / "ckpt")), expected)
    with ocp.PyTreeCheckpointer() as theirs:
        assert_same(bits(theirs.restore(tmp_path / "ckpt")), expected)
    usual = {name: value for name, value in tree.items() if name not in ("text", "none at all")}
    target = {**usual, "w": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=tree["w"].sharding)}
    found = ocp1.load(tmp_path / "ckpt", {**target, "text": "", "none at all": tree["none at all"]})
    assert found["w"].sharding == tree["w"].sharding
    assert_same(bits(found), bits(tree))
    tr.save(tmp_path / "usual", usual, format="orbax")
    found = restore_standard(tmp_path / "usual", target)
    assert_same(bits(found), bits(usual))
    ckpt = tr.open(tmp_path / "ckpt")
    assert (ckpt.metrics, ckpt.metadata, ckpt.nbytes) == ({"loss": math.inf}, {"a": [1]}, nbytes(tmp_path / "ckpt"))
    assert ckpt["w"].sharding.spec == PartitionSpec("x", "y") and ckpt["w"].sharding.mesh.shape == {"x": 4, "y": 2}
    assert ckpt["bf"].sharding is None
    assert_same(tr.restore(tmp_path / "ckpt", like=tree), tree)


def nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    "tree",
    [
        {},
        [],
        None,
        {"n": None},
        jnp.arange(3),
        np.float32(2),
        5,
        -0.0,
        "x",
        {"": np.ones(2), "a": {"": 1}},
        {1: 2, 2.5: 3},
        [[], ({}, [])],
    ],
    ids=repr,
)
def test_odd_trees(tmp_path: Path, tree: Any) -> None:
    tr.save(tmp_path / "ckpt", tree, format="orbax")
    expected = np.asarray(tree) if isinstance(tree, np.float32) else plain(tree)
    assert_same(tr.restore(tmp_path / "ckpt"), expected)
    if tree is not None:  # Orbax does not accept None as a tree
        assert_same(bits(restore_standard(tmp_path / "ckpt")), expected)
    assert_same(tr.restore(tmp_path / "ckpt", like=tree), tree)


def test_what_orbax_cannot_hold(tmp_path: Path) -> None:
    leaves = {
        "a": 1j,
        "b": b"1",
        "c": 2**64,
        "d": np.array("x"),
        "e": jnp.ones(2, jnp.uint4),
        "ok": 1,
        "f": -(2**63) - 1,
    }
    with pytest.raises(UnsupportedError) as caught:
        tr.save(tmp_path / "ckpt", leaves, format="orbax")
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == list("abcdef")
    with pytest.raises(UnsupportedError, match=r"a\.b.*under the same name.*a/b"):
        tr.save(tmp_path / "ckpt", {"a.b": 1, "a": {"b": 2}}, format="orbax")
    source = tr.open(save(tmp_path / "source", {"w": np.ones(1)}))
    with pytest.raises(MismatchError, match="zarr3"):
        tr.save(tmp_path / "ckpt", source, format="orbax", zarr3=True)
    assert sorted(os.listdir(tmp_path)) == ["source"]


def composite(path: Path) -> ocp.args.Composite:
    """Returns every item that Orbax finds in a folder by itself."""
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as theirs:
        return theirs.restore(path)


CONFIG = {"rate": 0.1, "layers": [1, None, {"x": "y"}, [], -0.0], "inf": -math.inf, "big": 2**80, "": {}, "a/b": True}


@pytest.mark.long
@pytest.mark.whole
def test_items_are_what_composite_reads(tmp_path: Path) -> None:
    params = {"w": jnp.arange(6.0).reshape(2, 3), "deep": [{"bf": jnp.ones(3, jnp.bfloat16)}, jax.random.key(3)]}
    opt = optax.adam(1e-3).init({"w": jnp.ones(3)})
    trees = {"params": params, "opt_state": opt, "state": {k: v for k, v in state().items() if k != "w"}}
    tree = {**trees, "config": CONFIG, "stateless": optax.sgd(1.0).init(params)}
    path = tmp_path / "run" / "7"
    report = tr.save(path, tree, format="orbax", composite=True, metrics={"loss": 0.5}, metadata={"by": "me"})
    assert report.nbytes == nbytes(path) == tr.open(path).nbytes
    for name, one in trees.items():
        assert_same(bits(restore_standard(path / name, one)), bits(one))
        assert_same(bits(restore_standard(path / name)), bits(plain(one)))
    with manager(tmp_path / "run", best_fn=lambda metrics: metrics["loss"]) as run:
        wanted = {name: ocp.args.StandardRestore(one) for name, one in trees.items()}
        found = run.restore(7, args=ocp.args.Composite(**wanted, config=ocp.args.JsonRestore()))
        assert_same(bits({name: found[name] for name in trees}), bits(trees))
        assert_same(found["config"], CONFIG)
        assert run.metrics(7) == {"loss": 0.5} and run.best_step() == 7
        about = run.metadata(7)
        assert about.metrics == {"loss": 0.5} and about.custom_metadata == {"by": "me"}
        w = about.item_metadata["params"]["w"]
        assert (w.shape, w.dtype) == ((2, 3), np.float32)
    ckpt = tr.open(tmp_path / "run")
    assert (ckpt.format, ckpt.step, ckpt.metrics, ckpt.metadata) == ("orbax", 7, {"loss": 0.5}, {"by": "me"})
    assert_same(ckpt.restore(), {name: plain(tree[name]) for name in sorted(tree)})
    assert_same(ckpt.restore(like=tree), tree)
    assert_same(tr.restore(path / "params", like=params), params)
    assert tr.verify(path).ok


def test_items_go_through_the_native_format_and_back(tmp_path: Path) -> None:
    arrays = {"w": np.arange(3.0), "step": 3, "none": None}
    with manager(tmp_path / "run") as run:
        items = {"params": ocp.args.StandardSave(arrays), "config": ocp.args.JsonSave(CONFIG)}
        run.save(2, args=ocp.args.Composite(**items))
    tr.convert(tmp_path / "run", tmp_path / "native")
    tr.convert(tmp_path / "native", tmp_path / "again" / "2", format="orbax", composite=True)
    steps = tmp_path / "run" / "2", tmp_path / "again" / "2"
    theirs, ours = (json.loads((step / "_CHECKPOINT_METADATA").read_text()) for step in steps)
    assert ours.keys() == theirs.keys() and ours["item_handlers"] == theirs["item_handlers"]
    assert tr.steps(tmp_path / "again") == [2] and not tr.diff(tmp_path / "again", tmp_path / "run")
    expected = {"params": arrays, "config": CONFIG}
    for path in steps:
        found = composite(path)
        assert_same(bits({name: found[name] for name in expected}), expected)
        assert_same(bits(ocp1.load_checkpointables(path)), expected)
    written = [{str(file.relative_to(step)) for file in step.glob("*/[!o]*")} for step in steps]
    assert written[0] == written[1]


def test_the_only_item_of_a_manager(tmp_path: Path) -> None:
    """A manager calls its only item `default`; Orbax and Treering both read it without that name."""
    tree = {"w": jnp.ones(3), "b": {"c": jnp.zeros(2)}}
    tr.save(tmp_path / "3", {"default": tree}, format="orbax", composite=True)
    with manager(tmp_path) as run:
        assert_same(bits(run.restore(3, args=ocp.args.StandardRestore(tree))), bits(tree))
    assert_same(tr.restore(tmp_path, like=tree), tree)
    assert_same(tr.restore(tmp_path, like={"default": tree}), {"default": tree})


def test_what_cannot_be_an_item(tmp_path: Path) -> None:
    one = {"w": np.ones(2)}
    wrong: dict[Any, Any] = {
        "a/b": one, "a\\b": one, "": one, "..": one, "x" * 256: one, "metrics": one, "array_metadatas": one,
        "s.orbax-checkpoint-tmp": one,
        "step": 3, "array": np.ones(2), "empty": {}, "none": None,
        "bytes": {"deep": [b""]}, "digits": {"n": 10**5000}, "nan": {"n": float(nan_with_bits())},
        "deep": {"x": nested(300)},
    }  # fmt: skip
    with pytest.raises(UnsupportedError) as caught:
        tr.save(tmp_path / "ckpt", {**wrong, "ok": one}, format="orbax", composite=True)
    named = [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]]
    expected = {str(key) if key else "''" for key in wrong} - {"bytes", "digits", "nan", "deep"}
    assert set(named) == expected | {"bytes/deep/0", "digits/n", "nan/n", "deep/x" + "/0" * 300}
    assert len(named) == len(expected) + 4
    assert "tr.rules.rename('^step$', 'group/step')" in str(caught.value)
    for tree in (np.ones(3), [one], (), {}, None):
        with pytest.raises(UnsupportedError, match=r"\(root\): composite=True makes an item of each key"):
            tr.save(tmp_path / "ckpt", tree, format="orbax", composite=True)
    no_bools: list[Any] = [["params"], "params", 1, None]
    for names in no_bools:
        with pytest.raises(MismatchError, match=r"composite=.* expected True"):
            tr.save(tmp_path / "ckpt", {"params": one}, format="orbax", composite=names)
    for format in ("treering", "t5x"):
        with pytest.raises(MismatchError, match="composite"):
            tr.save(tmp_path / "ckpt", {"params": one}, format=format, composite=True)
    for name in ("treering.json", "model.safetensors"):  # a folder with such a name in it would open as another format
        with pytest.raises(UnsupportedError, match="would open as"):
            tr.save(tmp_path / "ckpt", {name: one}, format="orbax", composite=True)
    assert not os.listdir(tmp_path)
    tr.save(tmp_path / "ckpt", {"step": 3, "params": one}, format="orbax", composite=True,
            rules=[rules.rename("^step$", "group/step")])  # fmt: skip
    assert_same(tr.restore(tmp_path / "ckpt"), {"group": {"step": 3}, "params": one})


def nan_with_bits() -> np.float64:
    return np.array([0x7FF8000000000001], np.uint64).view(np.float64)[0]


def nested(levels: int) -> Any:
    found: Any = "x"
    for _ in range(levels):
        found = [found]
    return found


def read_bytes() -> int:
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for one in found for value in one["values"])


@pytest.mark.parametrize(("ocdbt", "zarr3"), LAYOUTS)
def test_only_what_is_asked_for_is_read(tmp_path: Path, ocdbt: bool, zarr3: bool) -> None:
    spread = NamedSharding(mesh(), PartitionSpec("x"))
    draw = np.random.default_rng(0)
    # A chunk is a row, because replicas share the work
    array = jax.device_put(draw.integers(0, 1 << 32, (8, 1 << 16), np.uint32), spread)
    tree = {"w": array, "v": draw.random(1 << 20), "step": 5}
    path = save(tmp_path / "ckpt", tree, ocdbt=ocdbt, zarr3=zarr3)
    before = read_bytes()
    ckpt = tr.open(path)
    assert ckpt["w"].shape == (8, 1 << 16) and ckpt["step"] == 5
    assert read_bytes() - before < 10_000
    assert (ckpt["w"][3, 100:200] == np.asarray(array)[3, 100:200]).all()
    assert 262_000 < read_bytes() - before < 300_000
    assert (ckpt["w"][2:4] == np.asarray(array)[2:4]).all()
    assert read_bytes() - before < 900_000


# Bad files


def edit(file: Path, change: Any) -> None:
    about = json.loads(file.read_text())
    change(about)
    file.write_text(json.dumps(about))


def leaf(*keys: Any, kind: str = "np.ndarray", skip: bool = False, types: Any = None) -> dict[str, Any]:
    listed = [{"key": key, "key_type": types or (1 if key.isdigit() else 2)} for key in keys]
    return {"key_metadata": listed, "value_metadata": {"value_type": kind, "skip_deserialize": skip}}


@pytest.mark.parametrize(
    ("leaves", "error", "text"),
    [
        ([leaf("..", "w")], CorruptError, "nothing"),  # in a database, this is a name like any other
        ([leaf("w"), leaf("w")], CorruptError, "one leaf of this name"),
        ([leaf("w"), leaf("w", "x")], CorruptError, "a leaf or a container"),
        ([leaf("w", "x"), leaf("w")], CorruptError, "one leaf of this name"),
        ([leaf(), leaf("w")], CorruptError, "a leaf or a container"),
        ([leaf("w"), leaf()], CorruptError, "one leaf of this name"),
        ([leaf("0", "w"), leaf("0", "x", types=2)], CorruptError, "one key '0' at this place"),
        ([leaf("w"), leaf("0")], CorruptError, r"0/\.zarray"),
        ([leaf("w", types=3)], CorruptError, "expected keys of kind 1 or 2"),
        ([leaf("l", "0"), leaf("l", "2")], CorruptError, "numbered from 0"),
        ([leaf("l", "01")], CorruptError, "numbered from 0"),
        ([leaf("a.b"), leaf("a", "b")], CorruptError, "one name"),
        ([leaf(*["x"] * 1001)], UnsafeError, "levels"),
        ([leaf("w", kind="my.Own")], UnsupportedError, r"w \(my.Own\)"),
        ([leaf("w", skip=True)], CorruptError, "checkpoint: expected the leaf 'w', found none"),
        ([leaf("t", kind="string")], CorruptError, "the text 't'"),
        ([leaf("absent")], CorruptError, "absent"),
        ([leaf("\ud800")], UnsupportedError, "Unicode"),
        ([leaf("\ud800", kind="None", skip=True)], UnsupportedError, "Unicode"),
        ([{"key_metadata": 5}], CorruptError, "_METADATA"),
        ([{"key_metadata": [{"key": 5, "key_type": 2}], "value_metadata": {"value_type": "x"}}], CorruptError, "str"),
        ([5], CorruptError, "object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_trees_that_contradict_themselves(tmp_path: Path, leaves: Any, error: Any, text: str) -> None:
    path = save_standard(tmp_path / "ckpt", {"w": np.ones(2)})
    edit(path / "_METADATA", lambda about: about.update(tree_metadata={str(n): one for n, one in enumerate(leaves)}))
    with pytest.raises(error, match=text):
        tr.restore(path)


def test_containers_that_were_filled_later(tmp_path: Path) -> None:
    path = save_standard(tmp_path / "ckpt", {"w": {"x": np.ones(2)}})
    edit(path / "_METADATA", lambda about: about["tree_metadata"].update(first=leaf("w", kind="Dict", skip=True)))
    assert_same(tr.restore(path), {"w": {"x": np.ones(2)}})
    listed = {"0": leaf("w", kind="None", skip=True), "1": leaf("w", "x")}
    edit(path / "_METADATA", lambda about: about.update(tree_metadata=listed, custom_metadata={"a": 1}))
    assert_same(tr.restore(path), {"w": {"x": np.ones(2)}})
    assert tr.open(path).metadata == {"a": 1}


@pytest.mark.parametrize("name", ["../outside/w", "/etc", "a//b", "./w", "a\0b"])
def test_names_that_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    save(tmp_path / "outside", {"w": np.ones(2)}, ocdbt=False)
    path = save(tmp_path / "ckpt", {"w": np.ones(2)}, ocdbt=False)
    edit(path / "_METADATA", lambda about: about.update(tree_metadata={"0": leaf(name)}))
    with pytest.raises(UnsafeError, match=f"found {re.escape(repr(name))}"):
        tr.open(path)


@pytest.mark.parametrize(("ocdbt", "zarr3"), LAYOUTS)
def test_missing_parts_are_named(tmp_path: Path, ocdbt: bool, zarr3: bool) -> None:
    path = save(tmp_path / "ckpt", {"v": np.ones(2), "w": np.zeros((2, 2))}, ocdbt=ocdbt, zarr3=zarr3)
    files = {"driver": "file", "path": f"{path}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": files} if ocdbt else files).result()
    chunk, about = ("w/c/0/0", "w/zarr.json") if zarr3 else ("w/0.0", "w/.zarray")
    store.delete_range(ts.KvStore.KeyRange(chunk, chunk + "\0")).result()
    ckpt = tr.open(path)
    assert (ckpt["v"][...] == 1).all()
    with pytest.raises(CorruptError, match=chunk):
        ckpt.restore()
    assert [problem.leaves for problem in tr.verify(path).problems] == [("w",)]
    store.delete_range(ts.KvStore.KeyRange(about, about + "\0")).result()
    with pytest.raises(CorruptError, match=about):
        tr.restore(path)
    assert_same(tr.restore(path, at="v"), np.ones(2))
    assert [(problem.leaves, about in problem.what) for problem in tr.verify(path).problems] == [(("w",), True)]
    if ocdbt:
        (path / "manifest.ocdbt").unlink()
        with pytest.raises(CorruptError, match="manifest"):
            tr.open(path)


def test_files_about_the_tree_that_lie(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", {"key": jax.random.key(0), "t": "x", "n": 1})
    for name, contents, error in [
        ("array_metadatas/process_0", b"[]", CorruptError),
        ("array_metadatas/process_0", b'{"array_metadatas":[{"array_metadata":{}}]}', CorruptError),
        ("_strings.json", b"[]", CorruptError),
        ("_strings.json", b'{"t":5}', CorruptError),
        ("_METADATA", b"[" * 100_000, UnsafeError),
        ("_METADATA", b'{"tree_metadata":' + b'{"a":' * 100_000, UnsafeError),
        ("_METADATA", b'{"tree_metadata":{},"use_ocdbt":"yes"}', CorruptError),
        ("_METADATA", b"\xff", CorruptError),
        ("_METADATA", b'{"a":' + b"9" * 10_000 + b"}", CorruptError),
        ("_CHECKPOINT_METADATA", b"[]", CorruptError),
        ("_CHECKPOINT_METADATA", b"", CorruptError),
    ]:
        good = (path / name).read_bytes()
        (path / name).write_bytes(contents)
        with pytest.raises(error):
            tr.restore(path)
        (path / name).write_bytes(good)
    edit(
        path / "_CHECKPOINT_METADATA",
        lambda about: about.update(metrics={"a": "x"}, item_handlers=5, custom_metadata=[1]),
    )
    assert tr.open(path).metrics == {} and tr.open(path).metadata == [1]
    with open(path / "_METADATA", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnsafeError):
        tr.open(path)


def test_data_may_lie_behind_a_link(tmp_path: Path) -> None:
    """A user may have moved the files to a larger disk."""
    path = save(tmp_path / "ckpt", {"w": np.arange(5000)})
    data = path / "d"
    data.rename(tmp_path / "larger")
    data.symlink_to(tmp_path / "larger")
    assert (tr.restore(path)["w"] == np.arange(5000)).all() and tr.verify(path).ok


@pytest.mark.long
@pytest.mark.parametrize("size", [(16 << 20) + 1, 1 << 30, 10 << 30])
def test_a_description_that_is_too_long_is_not_read(tmp_path: Path, use_disk: Any, size: int) -> None:
    path = save(tmp_path / "run" / "7", {"w": np.ones(2)})
    file = path / "_CHECKPOINT_METADATA"
    about = json.loads(file.read_text())
    os.truncate(file, size)
    disk = use_disk(CountingDisk())
    assert formats.detect(stores.Filesystem(disk), str(path)).name == "orbax" and tr.steps(tmp_path / "run") == [7]
    for place in (path, tmp_path / "run"):
        with pytest.raises(UnsafeError, match=f"_CHECKPOINT_METADATA: {size} bytes"):
            tr.open(place)
    assert disk.nbytes < 100_000
    text = "x" * (15 << 20)
    file.write_text(json.dumps({**about, "custom_metadata": {"text": text}}))
    assert tr.open(path).metadata == {"text": text}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["_METADATA", "_CHECKPOINT_METADATA", "_strings.json", "_sharding", "array_metadatas/process_0", "w/.zarray"],
)
def test_damage(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "ckpt", {"w": jnp.arange(3), "k": jax.random.key(0), "t": "x", "n": 1, "e": []}, ocdbt=False)
    data = (path / name).read_bytes()
    seen: set[str] = set()
    for seed in range(150):
        (path / name).write_bytes(shuffled(data, seed))
        seen.add(outcome(path))
    for size in range(0, len(data), max(1, len(data) // 100)):
        (path / name).write_bytes(data[:size])
        seen.add(outcome(path))
    assert "fine" in seen and (len(seen) > 1 or name == "_sharding")


@pytest.mark.long
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tree_of_keys(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "ckpt"
    if not path.exists():
        save_standard(path, {"w": np.ones(2)})
    keys = st.lists(st.sampled_from(["w", "", "0", "1", "..", "a.b"]), max_size=4)
    kinds = st.sampled_from(["np.ndarray", "None", "Dict", "List", "scalar", "string", "NamedTuple", ""])
    made = st.builds(lambda k, kind, skip: leaf(*k, kind=kind, skip=skip), keys, kinds, st.booleans())
    leaves = data.draw(st.dictionaries(st.text(max_size=2), made | st.integers(), max_size=4))
    edit(path / "_METADATA", lambda about: about.update(tree_metadata=leaves))
    outcome(path)


@pytest.mark.long
@pytest.mark.parametrize("version_1", [False, True])
def test_the_level_of_an_only_item_may_be_in_the_template(tmp_path: Path, version_1: bool) -> None:
    tree = {"params": {"w": jnp.ones((4, 2))}, "step": 3}
    if version_1:
        ocp1.save(tmp_path / "1", tree)
    else:
        with manager(tmp_path) as run:
            run.save(1, args=ocp.args.StandardSave(tree))
    path, level = tmp_path / "1", "state" if version_1 else "default"
    assert_same(tr.restore(path, like=tree), tree)
    assert_same(tr.restore(path, like={level: tree}), {level: tree})
    assert_same(
        tr.restore(tmp_path, like=collections.OrderedDict({level: tree})), collections.OrderedDict({level: tree})
    )
    assert_same(tr.restore(path, like=tree, at=level), tree)
    assert_same(tr.restore(path, like=tree["params"], at=f"{level}/params"), tree["params"])
    assert_same(tr.restore(path, like={level: {"step": 0}}, extra=[f"{level}/params/**"]), {level: {"step": 3}})
    spread = NamedSharding(mesh(), PartitionSpec("x"))
    found = tr.restore(path, {level: {"params": tree["params"]}}, extra="ignore", sharding={level: spread})
    assert found[level]["params"]["w"].sharding == spread
    with pytest.raises(MismatchError, match=f"{level}/other"):
        tr.restore(path, like={level: {**tree, "other": 1}})
    with pytest.raises(MismatchError, match="other/step"):
        tr.restore(path, like={"other": tree})
    with pytest.raises(MismatchError, match=f"{level}/w"):
        tr.restore(path, like={level: tree["params"]}, at="params")
    with pytest.raises(NotFoundError, match="nothing is at 'other'"):
        tr.restore(path, at="other")
    for n, other in enumerate([jnp.arange(3), {"": np.ones(2)}, {"state": np.ones(1), "default": np.ones(2), "x": 1}]):
        ocp1.save(tmp_path / "others" / str(n), other)
        assert_same(tr.restore(tmp_path / "others" / str(n), like=other), other)
        if n < 2:
            assert_same(tr.restore(tmp_path / "others" / str(n), like={"state": other}), {"state": other})
        else:
            assert_same(
                tr.restore(tmp_path / "others" / str(n), like={"state": np.ones(1)}, extra="ignore")["state"],
                np.ones(1),
            )


@pytest.mark.long
@pytest.mark.whole
def test_arrays_of_jax_differ_from_those_of_numpy(tmp_path: Path) -> None:
    placed = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    tree = {"j": jax.device_put(jnp.arange(8.0), placed), "n": np.arange(3)}
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "a", tree)
    got = tr.restore(tmp_path / "a", sharding="saved")
    assert got["j"].sharding == placed and type(got["n"]) is np.ndarray
    tr.convert(tmp_path / "a", tmp_path / "b")
    assert [tr.open(tmp_path / "b")._source.entries[name].type for name in ("j", "n")] == ["jax", "numpy"]
