"""T5X's checkpoints.

T5X is not a dependency of the tests. `real/t5x` has small checkpoints that it wrote, with what its own reader finds in
them; `check.py` there lets T5X read what Treering writes. For other checkpoints, `save` and `load` below replace T5X.
They use the same libraries: Flax for the state dict, TensorStore for the arrays.
"""

import json
import math
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import msgpack
import numpy as np
import pytest
import tensorstore as ts
from flax import serialization
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import treering as tr
from helpers import REAL, assert_read_as_by, assert_same, described
from hostile_input import damaged, outcome, shuffled
from treering import formats, stores
from treering.errors import CorruptError, ExistsError, MismatchError, NotFoundError, UnsafeError, UnsupportedError
from treering.formats._zarr.chunks import even_chunk_shape
from treering.formats.t5x import write

FORMAT = formats.get("t5x")
GZIP = {"id": "gzip", "level": 1}  # what Treering writes, and T5X did until 2023
ZSTD = {"id": "zstd", "level": 1}


def spec_of(name: str, array: np.ndarray, chunks: Any, kvstore: str = "file") -> dict[str, Any]:
    path = {"driver": kvstore, "path": f"{name}/"}
    if kvstore == "gcs":
        path["bucket"] = "t5x-dummy-bucket"
    metadata = {"chunks": list(chunks), "compressor": ZSTD, "shape": list(array.shape)}
    return {"driver": "zarr", "dtype": array.dtype.name, "kvstore": path, "metadata": metadata}


def put(folder: Path, spec: dict[str, Any], array: np.ndarray) -> dict[str, Any]:
    """Stores all chunks of an array as T5X does, in the folder, for any kvstore in the spec."""
    kvstore = {"driver": "file", "path": f"{folder}/{spec['kvstore']['path']}"}
    where = {key: value for key, value in spec.items() if key != "path"} | {"kvstore": kvstore}
    where["store_data_equal_to_fill_value"] = True
    ts.open(where, create=True).result().write(array).result()
    return spec


def save(folder: Path, optimizer: Any, version: int | None = 3, large: int = 4, kvstore: str = "file") -> None:
    """Writes like T5X: arrays of more than `large` elements get files of their own."""
    os.makedirs(folder)

    def walk(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            return {key: walk(child, (*path, key)) for key, child in value.items()}
        if isinstance(value, np.ndarray) and value.size > large:
            chunks = [-(-size // 2) for size in value.shape]
            return put(folder, spec_of(".".join(path), value, chunks, kvstore), value)
        return value

    state = {"version": version, "optimizer": walk(optimizer, ())} if version else walk(optimizer, ())
    (folder / "checkpoint").write_bytes(packed(state))


def packed(state: Any) -> bytes:
    """Encodes a finished state dict; `to_bytes` would number the lists in specs."""
    return serialization.msgpack_serialize(state, in_place=True)


def load(folder: Path) -> dict[str, Any]:
    """Reads like T5X, and checks that chunks and compressor are those of the array, and that no chunk is missing."""
    contents = serialization.msgpack_restore((folder / "checkpoint").read_bytes())
    assert list(contents) == ["version", "optimizer"] and contents["version"] == 3

    def walk(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if not {"driver", "kvstore", "metadata"} <= value.keys():
            return {key: walk(child) for key, child in value.items()}
        spec = ts.Spec(value)
        assert spec.kvstore is not None
        chunks = value["metadata"]["chunks"]
        cells = [size / chunk for size, chunk in zip(value["metadata"]["shape"], chunks, strict=True)]
        assert all(count == int(count) for count in cells) and value["metadata"]["compressor"] == GZIP
        name = value["kvstore"]["path"]
        assert name.endswith("/") and len(os.listdir(folder / name)) == 1 + math.prod(cells)
        value = {**value, "metadata": {"shape": value["metadata"]["shape"]}}
        value |= {"kvstore": {"driver": "file", "path": f"{folder}/{name}"}, "fill_missing_data_reads": False}
        return ts.open(value, open=True).result().read().result()

    return walk(contents["optimizer"])


def small_t5() -> dict[str, Any]:
    """Returns the state of a tiny model in T5X's layout, with Adafactor's slots."""
    draw = np.random.default_rng(0)

    def layer(make: Any) -> Any:
        mlp = {"wi": {"kernel": make(8, 12)}, "wo": {"kernel": make(12, 8)}}
        return {"layers_0": {"mlp": mlp, "pre_mlp_layer_norm": {"scale": make(8)}}, "decoder_norm": {"scale": make(8)}}

    def slots(*shape: int) -> Any:
        factored = len(shape) > 1
        return {
            "m": None,
            "v": np.zeros(1, np.float32) if factored else draw.random(shape, np.float32),
            "v_row": draw.random(shape[0], np.float32) if factored else np.zeros(1, np.float32),
            "v_col": draw.random(shape[-1], np.float32) if factored else np.zeros(1, np.float32),
        }

    def bfloat16(*shape: int) -> Any:
        return draw.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)

    target = {"decoder": layer(bfloat16), "token_embedder": {"embedding": draw.random((16, 8), np.float32)}}
    states = {"decoder": layer(slots), "token_embedder": {"embedding": slots(16, 8)}}
    state = {"param_states": states, "step": np.array(1000, np.int32)}
    return {"target": target, "state": state, "flax_mutables": {}}


# What T5X wrote


@pytest.mark.parametrize("name", described("t5x"))
def test_checkpoints_of_t5x(tmp_path: Path, name: str) -> None:
    assert_read_as_by("t5x", name, tmp_path, format="t5x")
    run, step = name.split("/checkpoint_")
    assert int(step) in tr.steps(REAL / "t5x" / run) and tr.open(REAL / "t5x" / run, step=int(step)).step == int(step)


@pytest.mark.long
def test_a_real_file_with_every_leaf_in_it(tmp_path: Path) -> None:
    path = REAL / "t5x" / "test_t5_tiny.checkpoint_0"
    expected = serialization.msgpack_restore(path.read_bytes())["optimizer"]
    assert tr.open(path).format == "t5x" and len(tr.open(path)) > 250
    assert_same(tr.restore(path), expected)
    tr.convert(path, tmp_path / "native")
    tr.convert(tmp_path / "native", tmp_path / "checkpoint_0", format="t5x")
    assert_same(tr.restore(tmp_path / "checkpoint_0"), expected)
    assert_same(load(tmp_path / "checkpoint_0"), expected)


def test_iterators_over_data_that_t5x_wrote(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are TensorFlow checkpoints in a step's folder, and not steps of that folder.

    Treering cannot read them, and logs their names once.
    """
    path = REAL / "t5x" / "within" / "checkpoint_3"
    assert {"train_ds-000-of-001.index", "train_ds-000-of-001.data-00000-of-00001"} <= {*os.listdir(path)}
    for place in (path, path.parent, path / "checkpoint"):
        assert tr.open(place).format == "t5x" and tr.open(place).step == 3
    assert tr.steps(path) == [] and tr.steps(path.parent) == [3]
    template = tr.restore(path)
    position = r"train_ds-000-of-001 \(the position of an iterator of TensorFlow, which only that restores\)"
    for call in (
        lambda: tr.restore(path.parent),
        lambda: tr.restore(path.parent, like=template),
        lambda: tr.convert(path, tmp_path / "native"),
    ):
        caplog.clear()
        call()
        said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        assert len(said) == 1 and re.search(f"left out, because it cannot be read here: {position}", said[0])
    with pytest.raises(MismatchError, match=f"data: expected Random, found nothing; .*{position}") as error:
        tr.restore(path, like={**template, "data": random.Random()})
    assert "missing=" not in str(error.value)
    shutil.copytree(path, tmp_path / "run" / "checkpoint_3")
    for file in (tmp_path / "run" / "checkpoint_3").glob("train_ds*"):
        file.rename(file.with_name("train_ds-000-of-001")) if file.suffix == ".index" else file.unlink()
    caplog.clear()
    tr.open(tmp_path / "run")
    assert "train_ds-000-of-001 (the position of an iterator)" in caplog.text


def test_a_part_of_what_t5x_wrote(tmp_path: Path) -> None:
    path = REAL / "t5x" / "eight" / "checkpoint_1000"
    wi, full = tr.open(path)["target/wi"], tr.restore(path)["target"]["wi"]
    assert wi[5:, 2:17].tobytes() == full[5:, 2:17].tobytes()  # from six of its eight chunks
    assert len([*(path / "target.wi").iterdir()]) == 9
    shutil.copytree(path, tmp_path / "checkpoint_1000")
    (tmp_path / "checkpoint_1000" / "target.bias" / "3").unlink()  # T5X also writes chunks of zeros
    with pytest.raises(CorruptError, match=r"target/bias: .*target\.bias/3: expected a chunk"):
        tr.restore(tmp_path)


# What T5X writes


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("kvstore", ["file", "gfile", "gcs"])
@pytest.mark.parametrize("large", [4, 1 << 30])
def test_a_model_folder(tmp_path: Path, kvstore: str, large: int) -> None:
    state = small_t5()
    for step in (0, 990, 1000):
        state["state"]["step"] = np.array(step, np.int32)
        save(tmp_path / f"checkpoint_{step}", state, large=large, kvstore=kvstore)
    (tmp_path / "checkpoint_1010.tmp-1700000000").mkdir()
    (tmp_path / "checkpoint_1000" / "PINNED").write_text("")
    (tmp_path / "checkpoint_1000" / "train_ds-000-of-001.index").write_bytes(b"x")
    assert tr.steps(tmp_path) == [0, 990, 1000] and tr.open(tmp_path, step=0)["state/step"][...] == 0
    for path in (tmp_path, tmp_path / "checkpoint_1000", tmp_path / "checkpoint_1000" / "checkpoint"):
        ckpt = tr.open(path)
        assert (ckpt.format, ckpt.step) == ("t5x", 1000) and "target/decoder/layers_0/mlp/wi/kernel" in ckpt
        assert ckpt["state/param_states/decoder/decoder_norm/scale/m"] is None
        assert_same(ckpt.restore(), state)
    wi = tr.open(tmp_path)["target/decoder/layers_0/mlp/wi/kernel"]
    assert wi[3:5, 7:].tobytes() == state["target"]["decoder"]["layers_0"]["mlp"]["wi"]["kernel"][3:5, 7:].tobytes()
    files = [path for path in (tmp_path / "checkpoint_1000").rglob("*") if path.is_file()]
    own = [path for path in files if path.name != "PINNED" and not path.name.startswith("train_ds")]
    assert tr.open(tmp_path).nbytes == sum(path.stat().st_size for path in own)


@pytest.mark.long
def test_into_templates(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint_5", small_t5())
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    place = NamedSharding(mesh, PartitionSpec("y", "x"))
    like = {"embedding": jax.ShapeDtypeStruct((16, 8), np.float32, sharding=place)}
    found = tr.restore(tmp_path, like=like, at="target/token_embedder")["embedding"]
    assert found.sharding == place and np.array_equal(found, small_t5()["target"]["token_embedder"]["embedding"])
    target = tr.restore(tmp_path, like=tr.open(tmp_path).at("target").abstract(), at="target")
    assert_same(jax.tree.map(np.asarray, target), small_t5()["target"])


def test_files_of_2021(tmp_path: Path) -> None:
    w, b = np.arange(32, dtype=np.float32).reshape(2, 16), np.arange(16, dtype=np.float32)
    folder = tmp_path / "checkpoint_7"
    folder.mkdir()
    new = put(folder, spec_of("target.w", w, [2, 8], "gfile"), w)
    old = {**new, "metadata": {**new["metadata"], "dtype": "<f4", "chunks": [1, 3], "compressor": None}}
    old["transform"] = {"input_exclusive_max": [[2], [16]], "input_inclusive_min": [0, 0], "input_labels": ["", ""]}
    outside = put(folder, spec_of("target.b", b, [16], "gfile"), b)
    outside = {**outside, "path": "target.b/", "kvstore": {"driver": "gfile"}}
    state = {"version": 3, "optimizer": {"target": {"w": old, "b": outside}, "state": {"step": 7}}}
    (folder / "checkpoint").write_bytes(packed(state))
    assert_same(tr.restore(tmp_path), {"target": {"w": w, "b": b}, "state": {"step": 7}})
    (folder / "checkpoint").write_bytes(serialization.to_bytes({"target": {"w": new}}))  # Flax numbers their lists
    assert_same(tr.restore(tmp_path), {"target": {"w": w}})


def test_version_2_has_bfloat16_as_uint16(tmp_path: Path) -> None:
    large = np.arange(0x3F00, 0x3F00 + 40, dtype=np.uint16).reshape(8, 5)
    save(tmp_path / "checkpoint_1", {"target": {"large": large, "small": large[0, :3], "f": np.ones(2)}}, version=2)
    ckpt = tr.open(tmp_path)
    for name, array in (("large", large), ("small", large[0, :3])):
        assert ckpt[f"target/{name}"].dtype == ml_dtypes.bfloat16
        assert ckpt[f"target/{name}"][...].tobytes() == array.tobytes()
    assert ckpt["target/f"].dtype == np.float64
    tr.convert(tmp_path, tmp_path / "new", format="t5x")
    assert load(tmp_path / "new")["target"]["large"].dtype == ml_dtypes.bfloat16
    # The array is uint16, although its spec says bfloat16.
    named = spec_of("named", large.view(ml_dtypes.bfloat16), [8, 5])
    put(tmp_path / "checkpoint_1", spec_of("named", large, [8, 5]), large)
    state = {"version": 2, "optimizer": {"target": {"w": named}}}
    (tmp_path / "checkpoint_1" / "checkpoint").write_bytes(packed(state))
    assert tr.open(tmp_path / "checkpoint_1")["target/w"].dtype == ml_dtypes.bfloat16
    save(tmp_path / "checkpoint_2", {"target": {"w": large}}, version=3)
    assert tr.open(tmp_path / "checkpoint_2")["target/w"].dtype == np.uint16


@pytest.mark.parametrize("state", [small_t5(), {"optimizer": small_t5()}, {"version": 0, **small_t5()}])
def test_version_0_is_a_plain_state_dict(tmp_path: Path, state: Any) -> None:
    folder = tmp_path / "checkpoint_3"
    save(folder, state, version=None, large=1 << 30)
    assert tr.open(tmp_path).format == "t5x" and tr.open(tmp_path).step == 3
    assert_same(tr.restore(tmp_path), small_t5())


@pytest.mark.parametrize("version", [1, 4, -1, "3", 3.0, True, None])
def test_other_versions_are_refused(tmp_path: Path, version: Any) -> None:
    data = packed({"version": version, "optimizer": {"target": {}}})
    (tmp_path / "checkpoint").write_bytes(data)
    for path in (tmp_path, tmp_path / "checkpoint"):
        with pytest.raises(UnsupportedError, match="expected version 0, 2 or 3"):
            tr.open(path)
    (tmp_path / "x").write_bytes(data)  # it is a user's own file: any tree may have a key `version`
    assert tr.open(tmp_path / "x").format == "flax" and tr.open(tmp_path / "x")["version"] == version


def test_a_lone_file(tmp_path: Path) -> None:
    """T5X's own test data is a single file with every leaf in it and another name."""
    state = {"version": 3, "optimizer": small_t5()}
    path = tmp_path / "test_t5_tiny.checkpoint_12"
    path.write_bytes(packed(state))
    ckpt = tr.open(path)
    assert (ckpt.format, ckpt.step) == ("t5x", 12) and not hasattr(ckpt.restore()["state"]["step"], "version")
    assert_same(ckpt.restore(), small_t5())
    path.rename(tmp_path / "x")
    assert tr.open(tmp_path / "x").step == 1000  # the state itself records this step


@pytest.mark.long
@pytest.mark.whole
def test_the_step_of_the_state_itself(tmp_path: Path) -> None:
    save(tmp_path / "renamed", small_t5(), large=0)  # also if the step has files of its own
    assert tr.open(tmp_path / "renamed").step == 1000
    for step in (None, -1, 1.5, "x", np.ones(2), np.float32(1)):
        shutil.rmtree(tmp_path / "renamed")
        save(tmp_path / "renamed", {"target": {}, "state": {"step": step}}, large=10)
        assert tr.open(tmp_path / "renamed").step is None


# What is missing


def test_a_missing_chunk_is_never_zeros(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint_1", small_t5())
    array = tmp_path / "checkpoint_1" / "target.decoder.layers_0.mlp.wi.kernel"
    (array / "1.0").unlink()
    leaf = "target/decoder/layers_0/mlp/wi/kernel"
    with pytest.raises(CorruptError, match=rf"checkpoint_1: {leaf}: .*wi\.kernel/1\.0: expected a chunk"):
        tr.restore(tmp_path)
    ckpt = tr.open(tmp_path)
    with pytest.raises(CorruptError, match=leaf):
        ckpt[leaf][4:]
    assert ckpt[leaf][:4].shape == (4, 12)  # no chunk of this part is missing
    assert [problem.leaves for problem in tr.verify(tmp_path / "checkpoint_1").problems] == [(leaf,)]
    (array / ".zarray").unlink()
    with pytest.raises(CorruptError, match=rf"{leaf}: .*expected an array's metadata"):
        tr.open(tmp_path)
    shutil.rmtree(array)
    with pytest.raises(CorruptError, match=leaf):
        tr.open(tmp_path)


def test_a_damaged_step_is_passed_over(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / f"checkpoint_{step}", {"target": {"w": np.full((4, 4), step)}})
    (tmp_path / "checkpoint_2" / "target.w" / "0.0").unlink()
    assert tr.restore(tmp_path)["target"]["w"][0, 0] == 1
    with pytest.raises(CorruptError):
        tr.restore(tmp_path, step=2)


# Specs that lie


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"kvstore": {"driver": "file", "path": "../w/"}}, UnsafeError, "name of something in this folder"),
        ({"kvstore": {"driver": "file", "path": "/w/"}}, UnsafeError, "name of something in this folder"),
        ({"kvstore": {"driver": "file", "path": "a/../../w"}}, UnsafeError, "name of something in this folder"),
        ({"kvstore": {"driver": "file", "path": "w//"}}, UnsafeError, "name of something in this folder"),
        ({"kvstore": {"driver": "file", "path": "w\0/"}}, UnsafeError, "name of something in this folder"),
        ({"kvstore": {"driver": "file", "path": "w" * 300}}, UnsafeError, "name of something in this folder"),
        ({"kvstore": {"driver": "file", "path": "/"}}, CorruptError, "expected the path"),
        ({"kvstore": {"driver": "file", "path": ""}}, CorruptError, "expected the path"),
        ({"kvstore": {"driver": "file", "path": 5}}, CorruptError, "expected the path"),
        ({"kvstore": {"driver": "file"}}, CorruptError, "expected the path"),
        ({"kvstore": {"driver": "http", "path": "w/"}}, UnsupportedError, "gfile, gcs, found 'zarr' in 'http'"),
        ({"kvstore": {"path": "w/"}}, UnsupportedError, "found 'zarr' in None"),
        ({"kvstore": "file:///etc"}, CorruptError, "expected a TensorStore spec with a kvstore"),
        ({"driver": "n5"}, UnsupportedError, "found 'n5'"),
        ({"driver": ["zarr"]}, UnsupportedError, "found"),
        ({"metadata": {"shape": [4, 3]}}, CorruptError, r"expected the shape \[4, 3\] in .*, found \[4, 4\]"),
        ({"metadata": {"shape": 4}}, CorruptError, "expected the shape 4"),
        ({"dtype": "float64"}, CorruptError, "expected 'float64' in .*, found float32"),
        ({"dtype": {}}, CorruptError, "expected {} in"),
        ({"transform": {"input_exclusive_max": [2, 4]}}, UnsupportedError, "a transform"),
        ({"transform": {"input_inclusive_min": [1, 0]}}, UnsupportedError, "a transform"),
        ({"transform": {"output": [{"input_dimension": 1}, {"input_dimension": 0}]}}, UnsupportedError, "a transform"),
        ({"transform": {"unknown": 1}}, UnsupportedError, "a transform"),
        ({"transform": 5}, UnsupportedError, "a transform"),
    ],
)  # fmt: skip
def test_specs_that_lie(tmp_path: Path, changes: Any, kind: type, text: str) -> None:
    folder, w = tmp_path / "checkpoint_1", np.ones((4, 4), np.float32)
    folder.mkdir()
    put(tmp_path, spec_of("w", w, [4, 4]), w)
    spec = put(folder, spec_of("w", w, [4, 4]), w)
    for state, kinds in ((spec, None), ({**spec, **changes}, kind)):
        data = packed({"version": 3, "optimizer": {"target": {"leaf": state}}})
        (folder / "checkpoint").write_bytes(data)
        if kinds is None:
            assert tr.restore(folder)["target"]["leaf"].sum() == 16
            continue
        with pytest.raises(kind, match=text) as caught:
            tr.restore(folder)
        assert type(caught.value) is kind and f"{folder}/checkpoint: target/leaf: " in str(caught.value)


def test_metadata_of_arrays_that_lies(tmp_path: Path) -> None:
    folder, w = tmp_path / "checkpoint_1", np.ones((4, 4), np.float32)
    save(folder, {"target": {"w": w}})
    metadata = json.loads((folder / "target.w" / ".zarray").read_text())
    for changes in ({"shape": [4, 5]}, {"dtype": "<f8"}, {"dtype": "|O"}, {"chunks": [4]}, {"zarr_format": 3}):
        (folder / "target.w" / ".zarray").write_text(json.dumps({**metadata, **changes}))
        assert outcome(folder) in ("CorruptError", "UnsupportedError"), changes
    (folder / "target.w" / ".zarray").write_text(json.dumps(metadata))
    assert outcome(folder) == "fine"


# Folders that T5X refuses


def test_what_it_refuses(tmp_path: Path) -> None:
    def refused(state: Any, name: str = "checkpoint") -> str | None:
        folder = tmp_path / "folder"
        folder.mkdir(exist_ok=True)
        data = state if isinstance(state, bytes) else packed(state)
        (folder / name).write_bytes(data)
        both = [FORMAT.refuses(stores.get(""), str(folder / name))]
        if name == "checkpoint":
            both.append(FORMAT.refuses(stores.get(""), str(folder)))
        shutil.rmtree(folder)
        assert both[0] == both[-1]
        return both[0]

    assert "PLACEHOLDER" not in str(refused({"version": 3, "optimizer": {}}))
    assert refused({"version": 3, "optimizer": {}}) is None
    assert refused({"optimizer": {"target": {}}}) is None and refused({"target": {}, "state": {}}) is None
    assert refused({"optimizer": {"target": {}}, "version": 3}, "x") is None  # the keys in the other order
    assert "old releases of Orbax" in str(refused({"target": {"w": "PLACEHOLDER://target.w"}}))
    assert "begins with 'params'" in str(refused({"params": {"w": 1}}))
    assert "begins with 'optimizer'" in str(refused({"optimizer": {"target": {}}}, "checkpoint_5"))
    assert "begins with 'version'" in str(refused({"version": 1, "a": 1, "b": 2}, "x"))
    assert "begins with 'target'" in str(refused({"target": {}, "state": {}}, "checkpoint_5"))
    for other in (b"", b"model_checkpoint_path: 'x'", b"{}", b"\x80\x04}", b"\x92\x91\xa1a\xc4\0", b"\x82"):
        assert "does not begin like a state dict" in str(refused(other)), other
    assert FORMAT.refuses(stores.get(""), str(tmp_path)) == "it is a folder without a file checkpoint"
    assert FORMAT.refuses(stores.get(""), str(tmp_path / "absent")) == "there is nothing"
    assert FORMAT.refuses(stores.get(""), str(tmp_path / ("n" * 300))) is not None
    save(tmp_path / "x", {"target": {}})
    (tmp_path / "x" / "_METADATA").write_text("{}")
    assert FORMAT.refuses(stores.get(""), str(tmp_path / "x")) == "it is a folder of Orbax"
    shutil.rmtree(tmp_path / "x")
    (tmp_path / "checkpoint").mkdir()
    assert FORMAT.refuses(stores.get(""), str(tmp_path)) is not None
    with pytest.raises(NotFoundError):
        tr.open(tmp_path)


# Writing


@pytest.mark.long
def test_written_for_t5x(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "MAX_INLINE_BYTES", 16)
    monkeypatch.setattr(write, "CHUNK_BYTES", 64)
    state = small_t5()
    tr.save(tmp_path / "live" / "checkpoint_4", state, format="t5x")
    save(tmp_path / "theirs", state)
    report = tr.convert(tmp_path / "theirs", tmp_path / "run" / "checkpoint_4", format="t5x")
    for folder in (tmp_path / "live" / "checkpoint_4", tmp_path / "run" / "checkpoint_4"):
        assert_same(load(folder), state)
        assert_same(tr.restore(folder), state)
        assert (folder / "target.decoder.layers_0.mlp.wi.kernel" / "1.1").exists()  # bfloat16[8,12] in [4,6]
        metadata = json.loads((folder / "target.token_embedder.embedding" / ".zarray").read_text())
        assert metadata["chunks"] == [4, 4] and metadata["compressor"] == GZIP
    folder = tmp_path / "run" / "checkpoint_4"
    assert report.nbytes == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert tr.steps(tmp_path / "run") == [4] and tr.open(tmp_path / "run").format == "t5x"
    with pytest.raises(ExistsError):
        tr.save(folder, state, format="t5x")
    tr.save(folder, {"target": {"w": np.ones(2)}}, format="t5x", overwrite=True)
    assert_same(load(folder), {"target": {"w": np.ones(2)}})
    assert os.listdir(tmp_path / "run") == ["checkpoint_4"] and os.listdir(folder) == ["checkpoint"]


def test_numbers_of_python_become_arrays(tmp_path: Path) -> None:
    """T5X asks every leaf for its dtype, and cannot restore leaves without one."""
    numbers = {"step": 5, "rate": 0.1, "on": True, "c": 1 - 2j, "large": 2**64 - 1}
    tr.save(tmp_path / "checkpoint_5", {"state": numbers}, format="t5x")
    assert_same(load(tmp_path / "checkpoint_5")["state"], {name: np.array(value) for name, value in numbers.items()})
    assert tr.open(tmp_path).step == 5 and tr.open(tmp_path)["state/step"].dtype == np.int64
    assert_same(
        tr.restore(tmp_path, like={"state": dict.fromkeys(numbers, 0) | {"rate": 0.0, "on": False, "c": 0j}}),
        {"state": numbers},
    )
    save(tmp_path / "old" / "checkpoint_1", {"state": {"step": 5}})  # a number that was stored as one stays one
    assert type(tr.restore(tmp_path / "old")["state"]["step"]) is int


def test_what_t5x_never_partitions_lies_within(tmp_path: Path) -> None:
    """Adafactor's factors have no axes in T5X, so T5X cannot restore them from files of their own."""
    slots = {"v_row": np.ones(40_000, np.float32), "v_col": np.ones((2, 40_000)), "m": np.ones((2, 40_000))}
    state = {"target": {"v_rows": np.ones(40_000)}, "state": {"param_states": {"w": slots, "step": np.int32(3)}}}
    tr.save(tmp_path / "x", state, format="t5x")
    assert sorted(os.listdir(tmp_path / "x")) == ["checkpoint", "state.param_states.w.m", "target.v_rows"]
    assert_same(load(tmp_path / "x"), state)


@pytest.mark.parametrize(
    ("shape", "elements", "expected"),
    [
        ((8192, 8193), 4096**2, [4096, 2731]),
        ((8193,), 4096, [2731]),
        ((8192,), 4096, [4096]),
        ((8192,), 8192, [8192]),
        ((4096, 4096), 4096, [64, 64]),
        ((1, 1, 6), 3, [1, 1, 3]),
        ((1, 9, 4), 12, [1, 3, 4]),
        ((7,), 3, [1]),
        ((250_007, 4096), 1 << 24, [250_007, 64]),  # a prime: 250,007 chunks of one row each would be useless
        ((5, 7), 0, [1, 1]),
        ((), 1, []),
    ],
)
def test_chunks(shape: Any, elements: int, expected: list[int]) -> None:
    assert even_chunk_shape(shape, 2, 2 * elements) == expected


def test_names_and_places_of_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "MAX_INLINE_BYTES", 32)
    w = np.arange(30, dtype=np.float32)
    tree = {
        "a.b": w,
        "a": {"b": w + 1, "B": w + 2},
        "c/d": w + 3,
        "..": w + 4,
        "": w + 5,
        "checkpoint": w + 6,
        "x" * 300: w + 7,
        "array-0": w + 8,
        "array-1": w + 9,
        "ключ\n": w + 10,
        "c\\d": w + 11,
        "prime": np.arange(10**4 + 7)[:1009],
        "bits": w.astype(np.int8).astype(ml_dtypes.uint4),
        "time": np.arange(30).astype("M8[D]"),
        "float8": w.astype(ml_dtypes.float8_e4m3fn),
        "scalar": np.float64(1.5),
        "small": np.ones(2),
        "none": np.ones((0, 4)),
        "py": [1, 2.5, None, "text", b"\xc1", 1j, {}],
    }
    monkeypatch.setattr(write, "CHUNK_BYTES", 64)
    tr.save(tmp_path / "x", tree, format="t5x")
    numbers = [np.array(1), np.array(2.5), None, "text", b"\xc1", np.array(1j), {}]
    expected = serialization.msgpack_restore(serialization.to_bytes({**tree, "py": numbers}))
    assert_same(load(tmp_path / "x"), expected)
    assert_same(tr.restore(tmp_path / "x"), expected)
    separate = [name for name in os.listdir(tmp_path / "x") if name != "checkpoint"]
    assert len(separate) == 12 and sum(name.startswith("array-") for name in separate) == 10
    assert not {"prime", "bits", "time", "float8", "scalar", "small", "none"} & {*separate}
    assert os.listdir(tmp_path) == ["x"]


def test_a_lone_array(tmp_path: Path) -> None:
    tr.save(tmp_path / "x", np.arange(100_000), format="t5x")
    assert_same(tr.restore(tmp_path / "x"), np.arange(100_000))


def test_what_it_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        tr.save(tmp_path / "x", {"key": jax.random.key(0), "n": {"int": 2**70}, "ok": np.ones(3)}, format="t5x")
    assert "  key: a typed PRNG key" in str(caught.value) and "  n/int: " in str(caught.value)
    assert "  ok" not in str(caught.value) and os.listdir(tmp_path) == []
    with pytest.raises(MismatchError, match="expected no options"):
        tr.save(tmp_path / "x", {"a": 1}, format="t5x", chunks=1)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path / "theirs", {"target": {"w": np.ones((300, 300))}})
    (tmp_path / "theirs" / "target.w" / "1.1").unlink()
    with pytest.raises(CorruptError):
        tr.convert(tmp_path / "theirs", tmp_path / "x", format="t5x")
    assert os.listdir(tmp_path) == ["theirs"]


# Damage


@pytest.mark.long
def test_damage_anywhere(tmp_path: Path) -> None:
    save(tmp_path / "x", {"target": {"w": np.arange(6, dtype=np.int16)}, "state": {"step": 1, "n": None}})
    data = (tmp_path / "x" / "checkpoint").read_bytes()
    seen = set()
    for n, bad in enumerate(damaged(data)):
        if n < len(data) or n % 3 == 0:
            (tmp_path / "x" / "checkpoint").write_bytes(bad)
            seen.add(outcome(tmp_path / "x"))
    assert {"fine", "CorruptError", "UnsupportedError", "NotFoundError"} <= seen


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_damage(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    folder = tmp_path_factory.getbasetemp() / "any"
    if not folder.exists():
        save(folder, {"target": {"w": np.arange(6), "s": np.float32(1)}, "state": {"step": 1, "n": {}}})
        shutil.copy(folder / "checkpoint", folder / "good")
    (folder / "checkpoint").write_bytes(shuffled((folder / "good").read_bytes(), seed))
    outcome(folder)


def test_a_bomb(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    deep = msgpack.packb("version") + b"\x03" + msgpack.packb("optimizer") + b"\x81\xa1a" * 1001 + b"\x01"
    (tmp_path / "x" / "checkpoint").write_bytes(b"\x82" + deep)
    assert outcome(tmp_path / "x") == "UnsafeError"
