"""Levanter's checkpoints.

Levanter itself is not a test dependency, because it needs dozens of other packages. `real/levanter` has small
checkpoints that three releases of it wrote, and the contents that their own readers find in them. `check.py` in that
folder makes all three releases read checkpoints that Treering wrote. Other tests make checkpoints with the calls that
Levanter makes: JAX's array serialization, with a folder of zarr 2 for each leaf (until 2025) or an OCDBT database of
zarr 3 (since then).
"""

import json
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.experimental.array_serialization import serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import treering as tr
from helpers import REAL, assert_read_as_by, assert_same, described
from hostile_input import outcome, shuffled
from treering import rules
from treering.errors import CorruptError, MismatchError, NotFoundError, UnsafeError, UnsupportedError


def state() -> dict[str, jax.Array]:
    """Returns leaves by their paths in a checkpoint."""
    spread = NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")), PartitionSpec("x", "y"))
    return {
        "model/layers/0/weight": jax.device_put(jnp.arange(32.0).reshape(8, 4), spread),
        "model/layers/10/bias": jnp.zeros(3),
        "model/layers/10/half": jnp.ones(3, jnp.bfloat16),
        "model/none": jnp.zeros((0, 3)),
        "opt_state/0/count": jnp.array(5),
        "training_key": jnp.array([1, 2], jnp.uint32),
        "i4": jnp.arange(-3, 3, dtype=jnp.int4),
        "on": jnp.array(True),
    }


def make(folder: Path, step: int, *, ocdbt: bool = False, when: str = "2024-05-01T12:00:00.5", **more: Any) -> Path:
    """Writes a checkpoint as Levanter does, and returns its path."""
    path = folder / f"step-{step}"
    manager = serialization.GlobalAsyncCheckpointManager()
    leaves = state()
    if ocdbt:
        base = {"driver": "file", "path": str(path)}
        specs = [{"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": name}} for name in leaves]
        manager.serialize(list(leaves.values()), specs, on_commit_callback=lambda: None)
    else:
        paths = [str(path / name) for name in leaves]
        manager.serialize_with_paths(list(leaves.values()), paths, on_commit_callback=lambda: None)
    manager.wait_until_finished()
    (path / "metadata.json").write_text(json.dumps({"step": step, "timestamp": when, **more}))
    return path


def nested(leaves: Any) -> Any:
    root: dict[str, Any] = {}
    for path, leaf in sorted(leaves.items()):
        *parents, last = path.split("/")
        place = root
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = leaf
    return listed(root)


def listed(tree: Any) -> Any:
    """Returns a tree in which dicts whose keys are the numbers from 0 have become lists."""
    if not isinstance(tree, dict):
        return tree
    inner = {key: listed(value) for key, value in tree.items()}
    numbered = bool(inner) and set(inner) == {str(n) for n in range(len(inner))}
    return [inner[str(n)] for n in range(len(inner))] if numbered else inner


@pytest.mark.long
@pytest.mark.parametrize("name", described("levanter"))
def test_checkpoints_of_levanter(tmp_path: Path, name: str) -> None:
    assert_read_as_by("levanter", name, tmp_path, format="levanter")
    release, step = name.split("/step-")
    folder = REAL / "levanter" / release
    assert int(step) in tr.steps(folder) and tr.open(folder, step=int(step)).step == int(step)
    metadata = tr.open(folder / f"step-{step}").metadata
    assert metadata is not None and metadata["is_temporary"] is False


@pytest.mark.long
def test_named_arrays_that_levanter_wrote(named_array: Any) -> None:
    for release, step in (("1.2", 20), ("0.2.20", 20), ("0.2.20", 100)):
        path = REAL / "levanter" / release
        weight = named_array(jax.ShapeDtypeStruct((8, 6), np.float32), ("in", "out"))
        like = {"layers": [{"weight": weight}, {"weight": weight}]}
        found = tr.restore(path, like=like, at="model", step=step, extra="ignore")["layers"][1]["weight"]
        assert found.axes == ("in", "out")
        assert (found.array == tr.open(path, step=step)["model/layers/1/weight"][...]).all()


@pytest.mark.long
@pytest.mark.parametrize("ocdbt", [False, True])
def test_both_layouts(tmp_path: Path, ocdbt: bool) -> None:
    path = make(tmp_path, 20, ocdbt=ocdbt, is_temporary=True)
    ckpt = tr.open(path)
    assert (ckpt.format, ckpt.step, ckpt.metrics) == ("levanter", 20, {})
    assert ckpt.metadata == {"timestamp": "2024-05-01T12:00:00.5", "is_temporary": True}
    assert ckpt.nbytes == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    expected = nested({name: np.asarray(leaf) for name, leaf in state().items()})
    found = tr.restore(path)
    assert_same(found, expected)
    like = {"layers": [{"weight": state()["model/layers/0/weight"]}]}
    assert_same(tr.restore(path, like=like, at="model", extra="ignore"), like)
    where = NamedSharding(Mesh(np.array(jax.devices()), "d"), PartitionSpec("d"))
    shaped = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=where)
    spread = tr.restore(path, like={"0": {"weight": shaped}}, at="model/layers", extra="ignore")["0"]["weight"]
    assert spread.sharding == where and (np.asarray(spread) == expected["model"]["layers"]["0"]["weight"]).all()
    assert (ckpt["model/layers/0/weight"][3:5, 1:] == np.arange(32.0).reshape(8, 4)[3:5, 1:]).all()
    assert tr.restore(path, like={"count": 0}, at="opt_state/0") == {"count": 5}
    tr.save(tmp_path / "native", ckpt)
    assert_same(tr.restore(tmp_path / "native"), expected)


@pytest.mark.long
@pytest.mark.whole
def test_chunks_of_zeros_are_only_left_out_of_databases(tmp_path: Path) -> None:
    path = make(tmp_path, 1, ocdbt=True)
    keys = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/"}).result().list().result()
    assert b"model/layers/10/bias/zarr.json" in keys and b"model/layers/10/bias/c/0" not in keys
    assert (tr.open(path)["model/layers/10/bias"][...] == 0).all()
    path = make(tmp_path, 2)
    about = path / "model" / "layers" / "0" / "weight" / ".zarray"
    about.rename(path / "kept")
    with pytest.raises(CorruptError, match=r"model/layers/0/weight/\.zarray: expected the metadata of the array"):
        tr.restore(path)
    (path / "kept").rename(about)
    (path / "model" / "layers" / "10" / "bias" / "0").unlink()
    ckpt = tr.open(path)
    with pytest.raises(CorruptError, match="model/layers/10/bias/0"):
        ckpt["model/layers/10/bias"][...]
    assert [problem.leaves for problem in tr.verify(path).problems] == [("model/layers/10/bias",)]
    spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": f"file://{path.parent}/step-4/", "path": "w"}}
    ts.open(spec, create=True, dtype="float32", shape=[1 << 28]).result()  # only zeros, so that no chunk is written
    (tmp_path / "step-4" / "metadata.json").write_text((path / "metadata.json").read_text())
    assert (tr.open(tmp_path / "step-4")["w"][5:1000] == 0).all()
    make(tmp_path, 3, ocdbt=True)
    for file in (tmp_path / "step-3" / "d").iterdir():
        file.unlink()
    with pytest.raises(CorruptError):
        tr.restore(tmp_path / "step-3")


def test_a_database_below(tmp_path: Path) -> None:
    """A database in a folder of the checkpoint is found, as the specs of JAX's serializer may place it."""
    path = make(tmp_path, 1)
    base = {"driver": "file", "path": f"{path}/more/deep/"}
    spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": "w"}}
    ts.open(spec, create=True, dtype="float32", shape=[3]).result().write(np.ones(3, np.float32)).result()
    assert (tr.open(path)["more/deep/w"][...] == 1).all()
    assert len(tr.open(path)) == len(state()) + 1


def test_runs(tmp_path: Path) -> None:
    for step in (0, 5, 10):
        make(tmp_path, step)
    (tmp_path / "step-7" / "model").mkdir(parents=True)  # never committed
    shutil.copytree(tmp_path / "step-5", tmp_path / "copy-of-5")
    assert tr.steps(tmp_path) == [0, 5, 10]
    assert tr.open(tmp_path).step == 10
    later = {"step": 5, "timestamp": "2024-05-02T00:00:00"}  # The latest step is the greatest number, not the newest.
    (tmp_path / "step-5" / "metadata.json").write_text(json.dumps(later))
    (tmp_path / "copy-of-5" / "metadata.json").write_text(json.dumps(later))
    assert tr.open(tmp_path).step == 10
    assert tr.open(tmp_path, step=5).path == str(tmp_path / "step-5")  # Two names have step 5; the greater one wins.
    assert tr.open(tmp_path, step=0)["opt_state/0/count"][()] == 5
    with pytest.raises(NotFoundError, match=r"levanter: .*without metadata\.json"):
        tr.open(tmp_path / "step-7")
    for name, when in (("copy-of-5", "2024-06-01T00:00:00"), ("step-5", "2024-06-01T00:00:00+02:00")):
        about = {"step": 5, "timestamp": when}
        (tmp_path / name / "metadata.json").write_text(json.dumps(about))
        assert tr.open(tmp_path, step=5).path == str(tmp_path / "copy-of-5")
    (tmp_path / "step-5" / "metadata.json").write_text(json.dumps({"step": 5, "timestamp": "2025-01-01T00:00:00Z"}))
    assert tr.open(tmp_path, step=5).path == str(tmp_path / "step-5")


@pytest.mark.long
@pytest.mark.whole
def test_what_is_written_levanter_reads(tmp_path: Path) -> None:
    leaves = state()
    tree = {
        **nested(leaves),
        "step": 7,
        "rate": 1.5,
        "off": False,
        "none": None,
        "c": 1 + 2j,
        "list": [np.ones(2), {}],
        "~": np.ones(1),
    }
    tr.save(tmp_path / "run" / "step-30", tree, format="levanter")
    about = json.loads((tmp_path / "run" / "step-30" / "metadata.json").read_text())
    assert (about["step"], about["is_temporary"]) == (30, False)
    more = {"step": np.int64(7), "rate": 1.5, "off": False, "c": 1 + 2j, "list/0": np.ones(2), "~": np.ones(1)}
    expected = {name: np.asarray(leaf) for name, leaf in {**leaves, **more}.items()}
    jax.config.update("jax_enable_x64", True)
    try:
        where = [SingleDeviceSharding(jax.devices()[0])] * len(expected)
        paths = [str(tmp_path / "run" / "step-30" / name) for name in expected]
        found = serialization.GlobalAsyncCheckpointManager().deserialize_with_paths(where, paths)
        for (name, array), theirs in zip(expected.items(), found, strict=True):
            assert_same({name: np.asarray(theirs)}, {name: array})
    finally:
        jax.config.update("jax_enable_x64", False)
    assert_same(tr.restore(tmp_path / "run"), nested(expected))
    tr.save(tmp_path / "other", {"w": np.ones(2)}, format="levanter", step=4)
    assert tr.open(tmp_path / "other").step == 4
    tr.save(tmp_path / "other", {"w": np.ones(3)}, format="levanter", overwrite=True)
    assert tr.open(tmp_path / "other").step == 0 and tr.open(tmp_path / "other")["w"].shape == (3,)
    source = tr.open(make(tmp_path / "source", 6, ocdbt=True))
    tr.save(tmp_path / "again", source, format="levanter")
    assert_same(tr.restore(tmp_path / "again"), tr.restore(source.path))


@pytest.fixture
def named_array(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class with the tree structure of `haliax.NamedArray`: one child without a key. Haliax is not a dependency."""

    @jax.tree_util.register_pytree_node_class
    class NamedArray:
        def __init__(self, array: Any, axes: tuple[str, ...]):
            self.array, self.axes = array, axes

        def tree_flatten(self) -> Any:
            return (self.array,), self.axes

        @classmethod
        def tree_unflatten(cls, axes: Any, children: Any) -> Any:
            return cls(children[0], axes)

    module = types.ModuleType("haliax.core")
    monkeypatch.setattr(module, "NamedArray", NamedArray, raising=False)
    monkeypatch.setitem(sys.modules, "haliax.core", module)
    return NamedArray


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("ocdbt", [False, True])
def test_named_arrays_have_no_level_of_their_own(tmp_path: Path, named_array: Any, ocdbt: bool) -> None:
    """Levanter stores a named array under the path of the array in it."""
    path = make(tmp_path, 1, ocdbt=ocdbt)
    weight = state()["model/layers/0/weight"]
    like = {"layers": [{"weight": named_array(jax.ShapeDtypeStruct((8, 4), np.float32), ("in", "out"))}]}
    found = tr.restore(path, like=like, at="model", extra="ignore")["layers"][0]["weight"]
    assert type(found) is named_array and found.axes == ("in", "out") and (found.array == weight).all()
    alone = tr.restore(path, like=named_array(np.zeros(3, np.float32), ("a",)), at="model/layers/10/bias")
    assert alone.axes == ("a",) and (alone.array == 0).all()
    tree = {"model": {"w": named_array(weight, ("a", "b")), "s": named_array(jnp.float32(2.5), ())}}
    for name, format in (("step-2", "levanter"), ("own", "treering")):
        tr.save(tmp_path / name, tree, format=format)
        assert sorted(tr.open(tmp_path / name)) == ["model/s", "model/w"]
        back = tr.restore(tmp_path / name, like=jax.tree.map(jnp.zeros_like, tree))["model"]
        assert back["w"].axes == ("a", "b") and (back["w"].array == weight).all() and back["s"].array == 2.5
        assert_same(tr.restore(tmp_path / name), {"model": {"s": np.float32(2.5)[...], "w": np.asarray(weight)}})


def test_numbers_of_python_come_back_as_such(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    more = {"rate": jnp.float32(0.1), "half": jnp.bfloat16(0.5), "c": jnp.complex64(1 - 2j), "off": jnp.array(False)}
    manager = serialization.GlobalAsyncCheckpointManager()
    names = [str(path / "numbers" / name) for name in more]
    manager.serialize_with_paths(list(more.values()), names, on_commit_callback=lambda: None)
    manager.wait_until_finished()
    like = {"rate": 0.0, "half": 0.0, "c": 0j, "off": True}
    found = tr.restore(path, like=like, at="numbers")
    assert_same(found, {"rate": float(np.float32(0.1)), "half": 0.5, "c": 1 - 2j, "off": False})
    assert_same(
        tr.restore(path, like={"x": 0.0}, at="numbers", rules=[rules.rename("rate", "x")], extra="ignore")["x"],
        found["rate"],
    )
    for wrong in ({"rate": 0}, {"rate": 0j}, {"rate": True}, {"off": 0}, {"off": 0.0}, {"c": 0.0}):
        with pytest.raises(MismatchError, match="a template leaf of that type"):
            tr.restore(path, like=wrong, at="numbers", extra="ignore")
    with pytest.raises(MismatchError, match=r"expected float, found float32\[3\]"):
        tr.restore(path, like={"bias": 0.0}, at="model/layers/10", extra="ignore")
    tr.save(tmp_path / "own", tr.open(path).at("numbers"))  # The native format has arrays for them, too.
    assert_same(tr.restore(tmp_path / "own", like=like), found)


def test_large_arrays_are_cut_up(tmp_path: Path) -> None:
    array = np.zeros((3, 1 << 23), np.uint8)
    array[:, ::4096] = np.arange(3)[:, None]
    array[1, 77] = 9
    tr.save(tmp_path / "ckpt", {"w": array}, format="levanter")
    assert sorted(os.listdir(tmp_path / "ckpt" / "w")) == [".zarray", "0.0", "1.0"]
    assert (tr.restore(tmp_path / "ckpt")["w"] == array).all()


def test_what_levanter_cannot_hold(tmp_path: Path) -> None:
    leaves = {
        "a.b": 1,
        "": 1,
        "c/d": 1,
        "e": jax.random.key(0),
        "f": "x",
        "g": 2**64,
        "h": jnp.ones(2, jnp.uint4),
        "i" * 256: 1,
        "ok": 1,
    }
    with pytest.raises(UnsupportedError) as caught:
        tr.save(tmp_path / "ckpt", leaves, format="levanter")
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == ["(root)", "a.b", "c~1d", "e", "f", "g", "h", "i" * 256]
    with pytest.raises(UnsupportedError, match=r"\(root\)"):
        tr.save(tmp_path / "ckpt", np.ones(2), format="levanter")
    source = tr.open(make(tmp_path, 1))
    with pytest.raises(MismatchError, match="ocdbt"):
        tr.save(tmp_path / "ckpt", source, format="levanter", ocdbt=True)
    assert os.listdir(tmp_path) == ["step-1"]


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"{}",
        b'{"step":1}',
        b'{"step":"1","timestamp":""}',
        b'{"step":-1,"timestamp":""}',
        b"\xff",
        b"[" * 9999,
    ],
)
def test_other_folders_with_such_a_file(tmp_path: Path, text: bytes) -> None:
    path = make(tmp_path, 1)
    (path / "metadata.json").write_bytes(text)
    assert tr.steps(tmp_path) == []
    with pytest.raises(NotFoundError, match=r"levanter: .*metadata\.json"):
        tr.open(path)


@pytest.mark.long
@pytest.mark.whole
def test_what_lies_about(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    (path / "model" / "layers" / "0" / "weight" / "more").mkdir()  # Treering does not look below an array.
    (path / "empty").mkdir()
    (path / "12").mkdir()
    os.symlink(path, path / "loop")
    with pytest.raises(UnsafeError, match="a link"):
        tr.open(path)
    (path / "loop").unlink()
    (path / "/".join(["x"] * 300)).mkdir(parents=True)
    with pytest.raises(UnsafeError, match="levels"):
        tr.open(path)
    shutil.rmtree(path / "x")
    assert len(tr.open(path)) == len(state())
    path = make(tmp_path, 2, ocdbt=True)
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/"}).result()
    about = store.read("i4/zarr.json").result().value
    store.write("i4/below/zarr.json", about).result()
    with pytest.raises(UnsupportedError, match="i4/below: a leaf and a part of the path of another leaf"):
        tr.restore(path)


@pytest.mark.parametrize("shape", [[1 << 33, 1 << 27], [1 << 60, 0], [1 << 40]])
@pytest.mark.parametrize("ocdbt", [False, True])
def test_arrays_that_no_file_can_hold(tmp_path: Path, shape: list[int], ocdbt: bool) -> None:
    path = make(tmp_path, 1, ocdbt=ocdbt)
    files = {"driver": "file", "path": f"{path}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": files} if ocdbt else files).result()
    file = "i4/zarr.json" if ocdbt else "i4/.zarray"
    about = json.loads(store.read(file).result().value)
    chunks = [max(n, 1) for n in shape]
    about["shape"] = shape
    if ocdbt:
        about["chunk_grid"]["configuration"]["chunk_shape"] = chunks
    store.write(file, json.dumps({**about, **({} if ocdbt else {"chunks": chunks})})).result()
    with pytest.raises(UnsafeError, match="i4"):
        tr.open(path)


@pytest.mark.slow
@pytest.mark.parametrize("ocdbt", [False, True])
def test_damage(tmp_path: Path, ocdbt: bool) -> None:
    path = make(tmp_path, 1, ocdbt=ocdbt)
    seen: set[str] = set()
    for file in [file for file in path.rglob("*") if file.is_file() and file.stat().st_size]:
        data = file.read_bytes()
        for seed in range(12):
            file.write_bytes(shuffled(data, seed))
            seen.add(outcome(path))
        for size in range(0, len(data), max(1, len(data) // 6)):
            file.write_bytes(data[:size])
            seen.add(outcome(path))
        file.write_bytes(data)
    assert outcome(path) == "fine" and "CorruptError" in seen
