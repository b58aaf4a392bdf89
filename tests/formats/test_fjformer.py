"""Streams of FJFormer and EasyLM.

Neither library is a test dependency. `real/fjformer` has small files that both libraries wrote, and the contents that
their own readers find in them. `check.py` in that folder makes both libraries read files that Treering wrote. Other
tests use `save` and `load` below instead of the libraries. These use the MessagePack package and Flax, as both
libraries do.
"""

import io
import math
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import pytest
from flax import serialization, traverse_util
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import treering as tr
from helpers import REAL, assert_described, assert_read_as_by, assert_same, described
from hostile_input import damaged, outcome, shuffled
from treering import formats, stores
from treering.errors import CorruptError, MismatchError, NotFoundError, UnsafeError, UnsupportedError
from treering.formats import fjformer
from treering.formats._shared import state_dict_write
from treering.stores.posix import Disk

FORMAT = formats.get("easylm")


def save(path: Path, tree: Any) -> None:
    """Writes a stream as both libraries do."""
    packer = msgpack.Packer()
    with open(path, "wb") as file:
        for key, value in traverse_util.flatten_dict(serialization.to_state_dict(tree)).items():
            file.write(packer.pack((key, serialization.to_bytes(value))))


def load(path: Path) -> dict[tuple[str, ...], Any]:
    """Reads a stream as both libraries do."""
    with open(path, "rb") as file:
        unpacker = msgpack.Unpacker(file, read_size=83886080, max_buffer_size=0)
        return {tuple(key): serialization.from_bytes(None, value) for key, value in unpacker}


def leaves(tree: Any) -> dict[tuple[str, ...], Any]:
    return traverse_util.flatten_dict(serialization.to_state_dict(tree))


@pytest.fixture
def state() -> Any:
    """A train state as EasyLM has it. Its field `params` holds Flax variables, which have a level `params` too."""
    draw = np.random.default_rng(0)
    layer = {"kernel": draw.random((16, 8), np.float32), "bias": draw.random(8).astype(ml_dtypes.bfloat16)}
    params = {"params": {"transformer": {"h": {"0": layer, "1": layer}, "wte": {"embedding": draw.random((9, 4))}}}}
    return {"step": np.int32(7), "params": params, "opt_state": {"0": {}, "1": {"mu": params, "nu": None, "count": 3}}}


# Streams that FJFormer and EasyLM wrote


@pytest.mark.parametrize("name", [name for name in described("fjformer") if not name.endswith(".safetensors")])
def test_streams_of_fjformer_and_easylm(tmp_path: Path, name: str) -> None:
    path = REAL / "fjformer" / name
    assert_read_as_by("fjformer", name, tmp_path, format="fjformer")
    items = [sorted(msgpack.Unpacker(io.BytesIO(file.read_bytes()))) for file in (tmp_path / "back", path)]
    assert items[0] == items[1]  # byte for byte, in the order of the keys
    if "params" not in name:  # "state_params", "trainstate_params"
        leaves = described("fjformer")[name].items()
        params = {key.removeprefix("params/params/"): leaf for key, leaf in leaves if key.startswith("params/params/")}
        tr.save(tmp_path / "params", tr.restore(path, at="params/params"))
        assert_described(tmp_path / "params", params)


def test_folders_of_fjformer_and_easylm() -> None:
    folder = REAL / "fjformer"
    assert tr.steps(folder / "fjformer") == [7, 12] and tr.steps(folder / "easylm") == [20]
    assert tr.open(folder / "fjformer", step=7).path.endswith("streaming_state_7")  # It has more than the parameters.
    assert tr.open(folder / "fjformer").path.endswith("streaming_state") and tr.open(folder / "easylm").step == 20
    for pickled in folder.rglob("*.pkl"):
        with pytest.raises(UnsupportedError, match="it is a pickle"):
            tr.open(pickled)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("fjformer/streaming_state", "dataset.pkl"),
        ("fjformer/streaming_state_7", "dataset_7.pkl"),
        ("fjformer/streaming_params_7", ""),  # It has only parameters, so no job resumes from it.
    ],
)
def test_the_state_of_the_data_is_named(name: str, data: str, caplog: pytest.LogCaptureFixture) -> None:
    tr.restore(REAL / "fjformer" / name)
    said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(said) == bool(data) and all(f"left out, because it cannot be read here: {data} (" in one for one in said)


def test_safetensors_of_fjformer(tmp_path: Path) -> None:
    path, leaves = REAL / "fjformer" / "fjformer" / "params.safetensors", described("fjformer")
    dotted = {key.replace("/", "."): leaf for key, leaf in leaves["fjformer/params.safetensors"].items()}
    assert tr.open(path).metadata == {"format": "flax"}
    assert_described(path, dotted)
    tr.convert(path, tmp_path / "x.safetensors")
    assert_described(tmp_path / "x.safetensors", dotted)


# Streams in their layout


@pytest.mark.parametrize("name", ["streaming_train_state", "streaming_state", "streaming_train_state_7", "anything"])
def test_complete_state(tmp_path: Path, state: Any, name: str) -> None:
    save(tmp_path / name, state)
    ckpt = tr.open(tmp_path / name)
    assert ckpt.format == "fjformer" and ckpt.step == 7 and ckpt.nbytes == os.path.getsize(tmp_path / name)
    assert ckpt["opt_state/1/nu"] is None and ckpt["opt_state/1/count"] == 3
    assert_same(traverse_util.flatten_dict(ckpt.restore()), load(tmp_path / name))
    # The load types "state_params" and "trainstate_params" of the libraries read this part of it.
    params = tr.restore(tmp_path / name, at="params/params")
    assert_same(leaves(params), leaves(state["params"]["params"]))
    like = {"transformer": {"h": {"0": {"kernel": jnp.ones((16, 8)), "bias": ...}, "1": ...}, "wte": ...}}
    kernel = tr.restore(tmp_path / name, like=like, at="params/params")["transformer"]["h"]["0"]["kernel"]
    assert np.array_equal(kernel, state["params"]["params"]["transformer"]["h"]["0"]["kernel"])
    assert isinstance(kernel, jax.Array)


def test_parameters_alone_over_eight_devices(tmp_path: Path, state: Any) -> None:
    params = state["params"]["params"]["transformer"]["h"]
    save(tmp_path / "streaming_params_12", params)
    assert tr.steps(tmp_path) == [12]
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec("x"))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), params)
    found = tr.restore(tmp_path, like=like)
    assert all(leaf.sharding == place for leaf in jax.tree.leaves(found))
    assert_same(leaves(jax.tree.map(np.asarray, found)), leaves(params))


def test_written_for_them(tmp_path: Path, state: Any) -> None:
    state["opt_state"]["1"]["text"] = "é"
    state["opt_state"]["1"]["nan"] = math.nan
    state = jax.tree.map(lambda leaf: leaf, state, is_leaf=lambda leaf: leaf is None)  # This sorts the keys.
    save(tmp_path / "theirs", state)
    tr.convert(tmp_path / "theirs", tmp_path / "ours", format="fjformer")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert_same(load(tmp_path / "ours"), load(tmp_path / "theirs"))
    tr.save(tmp_path / "live", {"list": [1, (2.5, None)], "w": jnp.ones((2, 2)), "e": [], "3": 1j}, format="easylm")
    expected = {
        ("list", "0"): 1,
        ("list", "1", "0"): 2.5,
        ("list", "1", "1"): None,
        ("w",): np.ones((2, 2), "f4"),
    }
    found = load(tmp_path / "live")
    assert found.pop(("3",)) == 1j
    assert_same(found, expected)


def test_every_dtype_and_odd_keys(tmp_path: Path) -> None:
    names = [
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int4",
        "uint2",
        "bool",
        "int8",
        "uint64",
        "float16",
        "complex128",
    ]
    tree: dict[str, Any] = {name: np.arange(6).astype(getattr(ml_dtypes, name, name)).reshape(2, 3) for name in names}
    tree |= {"": np.ones(2), "a/b": {"~": np.ones((0, 3)), "ключ": np.float64(-0.0)}, "…" * 100: np.array(5)}
    tree["big"] = np.array([2**64 - 1], np.uint64)
    save(tmp_path / "x", tree)
    ckpt = tr.open(tmp_path / "x")
    assert "a~1b/~0" in ckpt and "" in ckpt
    for key, leaf in load(tmp_path / "x").items():
        found = ckpt["/".join(part.replace("~", "~0").replace("/", "~1") for part in key)]
        assert found[...].tobytes() == leaf.tobytes() and found.dtype == leaf.dtype and found.shape == leaf.shape
    tr.convert(tmp_path / "x", tmp_path / "native")
    tr.convert(tmp_path / "native", tmp_path / "y", format="fjformer")
    assert_same(load(tmp_path / "y"), load(tmp_path / "x"))


def test_large_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 100)
    monkeypatch.setattr(state_dict_write, "MAX_CHUNK_BYTES", 100)
    tree = {"a": {"b": np.arange(5), "w": np.random.default_rng(0).random((7, 13))}}
    save(tmp_path / "theirs", tree)
    ckpt = tr.open(tmp_path / "theirs")
    assert list(ckpt) == ["a/b", "a/w"] and ckpt["a/w"][2:5, 3].tobytes() == tree["a"]["w"][2:5, 3].tobytes()
    tr.convert(tmp_path / "theirs", tmp_path / "ours", format="easylm")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    monkeypatch.setattr(fjformer, "_MAX_BIN_BYTES", 200)
    with pytest.raises(UnsupportedError, match=r"a/w: more than 4 GiB") as caught:
        tr.convert(tmp_path / "theirs", tmp_path / "more", format="easylm")
    assert "a/b" not in str(caught.value) and not (tmp_path / "more").exists()


def test_only_structure_is_read(tmp_path: Path, use_disk: Any) -> None:
    """Opening reads only the structure. The stream is a sparse file with two leaves of 3.9 GB."""
    chunk = 1 << 30
    with open(tmp_path / "streaming_params", "wb") as file:
        for name in ("a", "b"):
            head = b"\x93" + msgpack.packb([chunk // 4]) + msgpack.packb("float32") + b"\xc6" + struct.pack(">I", chunk)
            parts = [b"\xc9" + struct.pack(">Ib", len(head) + chunk, 1) + head] * 3
            begin = b"\x83" + msgpack.packb("__msgpack_chunked_array__") + b"\xc3" + msgpack.packb("shape")
            begin += msgpack.packb({"0": 3, "1": chunk // 4}) + msgpack.packb("chunks") + b"\x83"
            keys = [msgpack.packb(str(n)) for n in range(3)]
            nbytes = len(begin) + sum(map(len, keys)) + sum(map(len, parts)) + 3 * chunk
            file.write(b"\x92" + msgpack.packb(["layer", name]) + b"\xc6" + struct.pack(">I", nbytes) + begin)
            for key, part in zip(keys, parts, strict=True):
                file.write(key + part)
                file.seek(chunk - 1, 1)
                file.write(b"\0")

    class Counting(Disk):
        count = 0

        def read(self, fd: int, buffer: memoryview, offset: int) -> int:
            self.count += len(buffer)
            return super().read(fd, buffer, offset)

    disk = use_disk(Counting())
    ckpt = tr.open(tmp_path)
    assert ckpt["layer/b"].shape == (3, chunk // 4) and disk.count < 200_000
    disk.count = 0
    assert not ckpt["layer/b"][1, 1000:1010].any() and disk.count == 40


# Folders


def test_the_latest_of_a_folder(tmp_path: Path, state: Any) -> None:
    def at(step: int) -> Any:
        return {**state, "step": np.int32(step)}

    save(tmp_path / "streaming_params_0", state["params"]["params"])
    save(tmp_path / "streaming_params_10", state["params"]["params"])
    save(tmp_path / "streaming_train_state_10", at(11))  # The step is the number in the name, not the one in the state.
    assert tr.steps(tmp_path) == [0, 10]
    assert tr.open(tmp_path).path.endswith("streaming_train_state_10") and tr.open(tmp_path).step == 10
    assert tr.open(tmp_path, step=0).path.endswith("streaming_params_0")
    save(tmp_path / "streaming_train_state", at(20))
    assert tr.steps(tmp_path) == [0, 10, 20]
    assert tr.open(tmp_path).path.endswith("streaming_train_state") and tr.open(tmp_path).step == 20
    save(tmp_path / "streaming_train_state", at(10))
    assert tr.open(tmp_path).path.endswith("streaming_train_state_10")
    (tmp_path / "streaming_train_state").write_bytes(b"")
    (tmp_path / "streaming_params_99").write_bytes(b"text")
    assert tr.steps(tmp_path) == [0, 10]


def test_a_folder_without_steps(tmp_path: Path, state: Any) -> None:
    (tmp_path / "streaming_state").mkdir()
    save(tmp_path / "streaming_params", state["params"]["params"])
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps({"step": 1}))
    (tmp_path / "dataset.pkl").write_bytes(pickle.dumps({}))
    ckpt = tr.open(tmp_path)
    assert tr.steps(tmp_path) == [] and ckpt.step is None and ckpt.metadata is None
    assert "transformer/h/0/bias" in ckpt and ckpt.path == str(tmp_path)
    (tmp_path / "streaming_state").rmdir()
    save(tmp_path / "streaming_state", {**state, "step": 3})
    assert tr.steps(tmp_path) == [3] and "opt_state/1/count" in tr.open(tmp_path)


@pytest.mark.parametrize("name", ["metadata.pkl", "metadata_10.pkl", "dataset_10.pkl", "something"])
def test_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "run"),)

    (tmp_path / name).write_bytes(pickle.dumps(Trap()))
    assert "it is a pickle" in str(FORMAT.refuses(stores.get(""), str(tmp_path / name)))
    with pytest.raises(UnsupportedError, match="fjformer: it is a pickle, like the metadata"):
        tr.open(tmp_path / name)
    assert not (tmp_path / "run").exists()


def test_what_it_refuses(tmp_path: Path) -> None:
    for data in (
        b"",
        b"\x92",
        b"\x92\x90\xc4\0",
        b"\x92\x91\x01\xc4\0",
        b"\x92\x91\xa1a\xa1b",
        b"\x93NUMPY",
        b"\x91\x91\xa1a",
        serialization.to_bytes({"a": np.ones(3)}),
        serialization.msgpack_serialize([[1, 2], 3]),
    ):
        (tmp_path / "x").write_bytes(data)
        assert "does not begin like a stream" in str(FORMAT.refuses(stores.get(""), str(tmp_path / "x"))), data
    assert FORMAT.refuses(stores.get(""), str(tmp_path / "absent")) == "there is nothing"
    assert "folder without streaming_train_state" in str(FORMAT.refuses(stores.get(""), str(tmp_path)))
    assert FORMAT.refuses(stores.get(""), str(tmp_path / ("n" * 300))) is not None
    with pytest.raises(NotFoundError):
        tr.open(tmp_path / "absent")
    deep = {"a": 1}
    for n in range(30):
        deep = {str(n): deep}
    save(tmp_path / "deep", deep)
    assert tr.open(tmp_path / "deep").format == "fjformer"


# Bad streams


def item(keys: Any, value: Any) -> bytes:
    return msgpack.packb([keys, value])


NIL = b"\xc0"


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (item(["a"], NIL) + b"\x05", CorruptError, "expected a key and bytes"),
        (item(["a"], NIL) + item("b", NIL), CorruptError, "expected a key and bytes"),
        (item(["a"], NIL) + item(["b"], "text"), CorruptError, "expected a key and bytes"),
        (item(["a"], NIL) + msgpack.packb([["b"], NIL, 1]), CorruptError, "expected a key and bytes"),
        (item(["a"], NIL) + item([], NIL), CorruptError, "expected a key of texts"),
        (item(["a"], NIL) + item([1], NIL), CorruptError, "expected a key of texts"),
        (item(["a"], NIL) + item([["b"]], NIL), CorruptError, "expected a key of texts"),
        (item(["a"], b""), CorruptError, "ends at"),
        (item(["a"], NIL * 2), CorruptError, "expected a value that ends at"),
        (item(["a"], b"\xc1"), CorruptError, "0xc1"),
        (item(["a"], b"\xc7\x01\x09\x00"), UnsupportedError, "found 9"),
        (item(["a"], b"\x81\xa1x\xc7\x01\x09\x00"), UnsupportedError, "a/x: .*found 9"),
        (item(["a"], NIL) + item(["a"], NIL), CorruptError, "two leaves have one path"),
        (item(["a"], NIL) + item(["b"], NIL) + item(["a", "b", "c"], NIL), CorruptError, "a is a leaf and also"),
        (item(["a", "b"], NIL) + item(["a"], NIL), CorruptError, "a is a leaf and also has leaves"),
        (item(["", "b"], NIL) + item([""], NIL), CorruptError, "is a leaf and also has leaves"),
        (item(["a"], NIL) + item(["a"] * 1001, NIL), UnsafeError, "1000 levels"),
        (item(["a"], NIL) + b"\x92\x91\xa1b\xc6\xff\xff\xff\xff", CorruptError, "cut short"),
        (item(["a"], NIL) + b"\x92\xdd\xff\xff\xff\xff", CorruptError, "cut short"),
    ],
)  # fmt: skip
def test_malformed_streams(tmp_path: Path, data: bytes, kind: type, text: str) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(kind, match=text) as caught:
        tr.open(tmp_path / "x")
    assert type(caught.value) is kind and str(tmp_path / "x") in str(caught.value)


@pytest.mark.long
def test_damage_anywhere(tmp_path: Path) -> None:
    save(tmp_path / "x", {"a": {"w": np.arange(3, dtype=np.int16), "n": None}, "step": 5, "z": np.float32(1)})
    data = (tmp_path / "x").read_bytes()
    seen = set()
    for bad in damaged(data):
        (tmp_path / "x").write_bytes(bad)
        seen.add(outcome(tmp_path / "x"))
    assert {"fine", "CorruptError", "UnsupportedError"} <= seen


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_damage(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    path = tmp_path_factory.getbasetemp() / "streaming_params"
    save(path, {"a": {"w": np.arange(3), "n": None}, "b": {"c": {"d": np.ones((2, 2), np.float16)}}, "step": 5})
    path.write_bytes(shuffled(path.read_bytes(), seed))
    outcome(path)
    outcome(path.parent)


def test_what_it_cannot_hold(tmp_path: Path) -> None:
    tree = {"key": jax.random.key(0), "int": 2**70, "ok": 1}
    with pytest.raises(UnsupportedError) as caught:
        tr.save(tmp_path / "x", tree, format="fjformer")
    assert "  key: a typed PRNG key" in str(caught.value) and "  int: " in str(caught.value)
    assert "  ok" not in str(caught.value) and not os.listdir(tmp_path)
    with pytest.raises(UnsupportedError, match="it has no key"):
        tr.save(tmp_path / "x", np.ones(3), format="fjformer")
    with pytest.raises(UnsupportedError, match="expected leaves, found none"):
        tr.save(tmp_path / "x", {"a": {}}, format="fjformer")
    with pytest.raises(MismatchError, match="expected no options"):
        tr.save(tmp_path / "x", {"a": 1}, format="fjformer", chunk=1)
