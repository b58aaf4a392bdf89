"""Tests of Flax's files: files that Flax wrote, files that Treering wrote for Flax, and bad ones."""

import asyncio
import json
import math
import os
import pickle
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training import checkpoints
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.array_serialization.serialization import get_tensorstore_spec
from jax.experimental.array_serialization.tensorstore_impl import async_serialize
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import treering as tr
from helpers import assert_described, described
from hostile_input import damaged, outcome, shuffled
from treering import formats, stores
from treering.errors import (
    CorruptError,
    ExistsError,
    MismatchError,
    NotFoundError,
    TreeringError,
    UnsafeError,
    UnsupportedError,
)
from treering.formats._shared import extents, state_dict_write
from treering.formats._shared import msgpack as msgpack_scanner
from treering.stores.memory import MemoryStore
from treering.stores.posix import Disk

REAL, CLUS = (Path(__file__).parent.parent / "real" / name for name in ("flax", "clu"))
SMALL = [name for name in dir(ml_dtypes) if name.startswith(("float", "bfloat", "int", "uint", "complex", "bcomplex"))]
DTYPES = [
    *(np.dtype(getattr(ml_dtypes, name)) for name in SMALL),
    *map(np.dtype, ["?", *"bBhHiIlLefdFD", "M8[D]", "m8[ns]"]),
]


def every_bit(dtype: np.dtype, shape: tuple[int, ...] = (3, 5)) -> np.ndarray:
    """Returns an array with unusual bits: NaNs with payloads, negative zeros, the largest and smallest values."""
    count = math.prod(shape)
    if dtype.kind == "b":
        return (np.arange(count) % 3 == 0).reshape(shape)
    raw = np.random.default_rng(0).integers(0, 256, count * dtype.itemsize, np.uint8)
    raw[: dtype.itemsize] = 0xFF
    if count > 1:
        raw[dtype.itemsize : 2 * dtype.itemsize] = [0] * (dtype.itemsize - 1) + [0x80]
    if dtype.name in ("int1", "int2", "int4", "uint1", "uint2", "uint4") or dtype.name.startswith(("float4", "float6")):
        bits = int(dtype.name.lstrip("uintfloa")[0])
        return (raw % (1 << bits)).view(dtype).reshape(shape)
    return raw.view(dtype).reshape(shape)


def assert_equal(ours: Any, theirs: Any, path: str = "") -> None:
    """Asserts that two state dicts are equal bit for bit and have the same order."""
    assert type(ours) is type(theirs), (path, type(ours), type(theirs))
    if isinstance(ours, dict):
        assert list(ours) == list(theirs), path
        for key in ours:
            assert_equal(ours[key], theirs[key], f"{path}/{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), path
        for n, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(a, b, f"{path}/{n}")
    elif isinstance(ours, np.ndarray | np.generic):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), path
        assert ours.tobytes() == theirs.tobytes(), path
    elif isinstance(ours, float):
        assert struct.pack("d", ours) == struct.pack("d", theirs), path
    elif isinstance(ours, complex):
        assert struct.pack("dd", ours.real, ours.imag) == struct.pack("dd", theirs.real, theirs.imag), path
    else:
        assert ours == theirs, path


def check_both_ways(tmp_path: Path, tree: Any) -> Any:
    """Asserts that Treering reads Flax's file and writes the same bytes from it. Returns the restored tree."""
    theirs, ours = tmp_path / "theirs.msgpack", tmp_path / "ours.msgpack"
    data = serialization.to_bytes(tree)
    theirs.write_bytes(data)
    found = tr.restore(theirs)
    assert_equal(found, serialization.msgpack_restore(data))
    tr.convert(theirs, ours, format="flax", overwrite=True)
    assert ours.read_bytes() == data
    return found


class Counting(Disk):
    """Counts the bytes that are read, and the calls that read them."""

    def __init__(self) -> None:
        self.count = self.calls = 0

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        done = super().read(fd, buffer, offset)
        self.count += done
        self.calls += 1
        return done


# Files of Flax


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: np.dtype) -> None:
    array = every_bit(dtype)
    tree = {"a": array, "scalar": array[1, 2], "zero-d": array[2, 1].reshape(()), "none": array[:0]}
    found = check_both_ways(tmp_path, tree)
    assert type(found["scalar"]) is type(array[1, 2]) and found["zero-d"].shape == ()
    for mmap in (True, False):
        assert_equal(tr.restore(tmp_path / "theirs.msgpack", mmap=mmap), found)
    ckpt = tr.open(tmp_path / "theirs.msgpack")
    assert ckpt.format == "flax" and ckpt.nbytes == os.path.getsize(ckpt.path) and ckpt.step is None
    assert ckpt["a"][1:, 2].tobytes() == array[1:, 2].tobytes()


def test_values(tmp_path: Path) -> None:
    ints = [0, 1, 127, 128, 255, 256, 2**16, 2**32, 2**53 + 1, 2**63, 2**64 - 1, -1, -32, -33, -(2**31), -(2**63)]
    nan = struct.unpack("d", struct.pack("Q", 0xFFF8000000000123))[0]
    floats = [0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, nan, 5e-324]
    texts = ["", "x" * 31, "x" * 32, "y" * 300, "é\U0001f600\n\0", "z" * 70_000]
    values = [*ints, *floats, *texts, True, False, None, 1 - 2j, complex(nan, -0.0), b"", b"\x80\x04.", b"b" * 70_000]
    check_both_ways(tmp_path, {f"v{n}": value for n, value in enumerate(values)})


def test_containers(tmp_path: Path) -> None:
    w = np.arange(6, dtype=np.int16).reshape(2, 3)
    tree = {
        "list": [w, [], (w, {})],
        "empty": {},
        "named": optax.ScaleByAdamState(w, (), {"x": w}),
        "none": None,
        "": {"": w},
        "a/b~c~1.d": {"ключ 🔑": w, "\n": 1, "..": 2},
        "__class__": 1,
        **{f"many{n}": n for n in range(20)},
    }
    check_both_ways(tmp_path, tree)
    ckpt = tr.open(tmp_path / "theirs.msgpack")
    assert ckpt["list/0"].shape == (2, 3) and ckpt["a~1b~0c~01.d/ключ 🔑"].shape == (2, 3) and ckpt["/"].shape == (2, 3)
    assert ckpt.abstract()["list"] == {
        "0": jax.ShapeDtypeStruct((2, 3), np.int16),
        "1": {},
        "2": ckpt.at("list/2").abstract(),
    }


@pytest.mark.parametrize("leaf", [np.arange(3), np.float32(1.5), 7, 2.5, "text", None, 1j, b"\1", {}], ids=repr)
def test_a_lone_leaf(tmp_path: Path, leaf: Any) -> None:
    check_both_ways(tmp_path, leaf)


def test_lists_and_other_keys_of_the_low_level_function(tmp_path: Path) -> None:
    tree = {"list": [np.arange(2), [], {"x": 1}], 1: np.arange(3), 2**60: 1, -1: 2, 1.5: 3, b"k": 4, False: 5}
    path = tmp_path / "x.msgpack"
    path.write_bytes(serialization.msgpack_serialize(tree, in_place=True))
    assert_equal(tr.restore(path), tree)
    assert list(tr.open(path)) == ["list/0", "list/2/x", "1", str(2**60), "-1", "1.5", "k", "False"]
    tr.convert(path, tmp_path / "ours.msgpack")
    found = serialization.msgpack_restore((tmp_path / "ours.msgpack").read_bytes())
    assert_equal(found["list"], {"0": np.arange(2), "1": {}, "2": {"x": 1}})
    assert list(found) == ["list", "1", str(2**60), "-1", "1.5", "k", "False"]


def test_named_tuples_as_they_were_until_2020(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint_3"
    old = {"name": "ScaleByAdamState", "fields": {"0": "count", "1": "mu"}, "values": {"0": 5, "1": {"w": np.ones(2)}}}
    path.write_bytes(serialization.msgpack_serialize({"opt": {"0": old}, "other": {**old, "name": 1}}))
    ckpt = tr.open(path)
    assert list(ckpt.at("opt")) == ["0/count", "0/mu/w"] and "other/fields/0" in ckpt
    like = {"opt": [optax.ScaleByAdamState(0, {"w": np.zeros(2)}, None)]}
    assert ckpt.restore(like, extra=["other/**"])["opt"][0].mu["w"].tolist() == [1, 1]
    with pytest.raises(MismatchError, match="ScaleByAdamState"):
        ckpt.restore({"opt": [optax.ScaleByRssState(0)]}, missing="template", extra="ignore")


def test_large_arrays_are_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 64)
    monkeypatch.setattr(state_dict_write, "MAX_CHUNK_BYTES", 64)
    monkeypatch.setattr(state_dict_write, "_SLICE_BYTES", 48)
    tree = {
        "w": every_bit(np.dtype("f4"), (7, 11)),
        "exact": np.arange(16, dtype=np.int32),
        "wide": every_bit(np.dtype("c16"), (9,)),
        "odd": every_bit(np.dtype(ml_dtypes.bfloat16), (5, 7, 3)),
        "in": {"b": every_bit(np.dtype("u1"), (129,))},
    }
    check_both_ways(tmp_path, tree)
    ckpt = tr.open(tmp_path / "ours.msgpack")
    assert list(ckpt) == ["w", "exact", "wide", "odd", "in/b"]
    for index in (np.s_[2:5, 3:9], np.s_[6], np.s_[:, 10], np.s_[3, 4], np.s_[::-2, 1:8:3]):
        assert ckpt["w"][index].tobytes() == tree["w"][index].tobytes()
    check_both_ways(tmp_path, every_bit(np.dtype("f4"), (40,)))  # one array that is the entire tree


@pytest.fixture
def backend() -> Iterator[Any]:
    """A function that chooses, for one test, whether `flax.training.checkpoints` writes with Orbax."""
    before = flax.config.flax_use_orbax_checkpointing
    yield lambda orbax: flax.config.update("flax_use_orbax_checkpointing", orbax)
    flax.config.update("flax_use_orbax_checkpointing", before)


@pytest.mark.long
def test_a_train_state(tmp_path: Path, backend: Any) -> None:
    backend(False)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(8, name="last")(nn.relu(nn.Dense(16, name="first")(x)))

    params = Model().init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    state = TrainState.create(apply_fn=Model().apply, params=params, tx=optax.chain(optax.clip(1.0), optax.adamw(1e-3)))
    for step in (0, 9, 10):
        state = state.replace(step=step)
        checkpoints.save_checkpoint(tmp_path, state, step, keep=5)
    checkpoints.save_checkpoint(tmp_path, state, 1e5, keep=5)  # a float: checkpoint_100000.0
    assert tr.steps(tmp_path) == [0, 9, 10, 100_000]
    assert tr.open(tmp_path).path.endswith("checkpoint_100000.0") and tr.open(tmp_path, step=9)["step"] == 9
    assert tr.open(tmp_path, step=0).step == 0
    restored = tr.restore(tmp_path, like=state, step=10)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert type(a) is type(b) and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    parameters = tr.restore(tmp_path, like=params, at="params")
    assert parameters["first"]["kernel"].shape == (4, 16)
    # Over eight devices
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    place = NamedSharding(mesh, PartitionSpec("x", "y"))
    like = {"kernel": jax.ShapeDtypeStruct((4, 16), np.float32, sharding=place), "bias": ...}
    kernel = tr.restore(tmp_path, like=like, at="params/first")["kernel"]
    assert kernel.sharding == place and np.array_equal(kernel, params["first"]["kernel"])
    # Flax restores what Treering writes.
    tr.save(tmp_path / "ours.msgpack", state)
    back = serialization.from_bytes(state, (tmp_path / "ours.msgpack").read_bytes())
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes() and np.asarray(a).dtype == np.asarray(b).dtype


@pytest.mark.parametrize("name", sorted(path.name for path in REAL.iterdir()))
def test_real_files(tmp_path: Path, name: str) -> None:
    data = (REAL / name).read_bytes()
    ckpt = tr.open(REAL / name)
    assert ckpt.format == "flax" and ckpt.step == (0 if name == "checkpoint_0" else None)
    assert_equal(ckpt.restore(), serialization.msgpack_restore(data))
    tr.convert(REAL / name, tmp_path / "native")
    tr.convert(tmp_path / "native", tmp_path / "x.msgpack")
    assert (tmp_path / "x.msgpack").read_bytes() == data


# Runs


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["ckpt_0", "ckpt_10", "ckpt_9"], {0: "ckpt_0", 9: "ckpt_9", 10: "ckpt_10"}),
        (["c_1e1", "c_2.0", "c_3.", "c_1E+2"], {10: "c_1e1", 2: "c_2.0", 3: "c_3.", 100: "c_1E+2"}),
        (["checkpoint_0.5", "checkpoint_-3", "checkpoint_1e-1", "checkpoint_1e999", "checkpoint_tmp"], {}),
        (["checkpoint_0.5", "checkpoint_2", "checkpoint_1.5"], {2: "checkpoint_2"}),
        (["gen_1", "v1.5"], {1: "gen_1"}),
        (["model-5", "model-7"], {5: "model-5", 7: "model-7"}),
        (["ckpt.12"], {12: "ckpt.12"}),
        (["12"], {12: "12"}),
        (["gen_1", "dis_1"], {}),  # two runs
        (["gen_1", "checkpoint_2"], {2: "checkpoint_2"}),
        (["checkpoint_5.msgpack", "checkpoint_5x", "checkpoint_²"], {}),
        (["checkpoint_007"], {7: "checkpoint_007"}),
        (["checkpoint_10", "checkpoint_1e1"], {10: "checkpoint_10"}),
        (["a-1.flax", "a-1.index", "a-2.flax", "a-1.data-00000-of-00001"], {1: "a-1.flax"}),  # files of clu
    ],
)  # fmt: skip
def test_steps_of_a_folder(tmp_path: Path, names: list[str], steps: dict[int, str]) -> None:
    for name in names:
        (tmp_path / name).write_bytes(serialization.to_bytes({"w": np.ones(2)}))
    assert formats.get("flax").steps(stores.get(""), str(tmp_path), sorted(names)) == steps
    for name in names:
        found = tr.open(tmp_path / name).step
        assert found == next(
            (step for step, other in steps.items() if other == name), found if len(steps) <= 1 else None
        )


POSITION = "the position of an iterator of TensorFlow"
CLU = sorted(f"{run}/{path.stem}" for run in ("named", "state") for path in (CLUS / run).glob("*.flax"))


@pytest.mark.parametrize("name", CLU)
def test_real_files_of_clu(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    run, step = CLUS / name.partition("/")[0], int(name[-1])
    for path in (CLUS / name, CLUS / f"{name}.flax"):
        caplog.clear()
        tr.restore(path)
        said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        file = f"{Path(name).name}.index"  # It has the state of a data iterator.
        assert said == [
            f"{path}: left out, because it cannot be read here: {file} ({POSITION}, which only that restores)"
        ]
    for path in (CLUS / name, CLUS / f"{name}.flax"):
        assert (tr.open(path).format, tr.open(path).step) == ("flax", step) and tr.verify(path).ok
        assert_described(path, described("clu")[name])
    assert step in tr.steps(run) == sorted(int(other[-1]) for other in CLU if other.startswith(run.name))
    assert tr.open(run, step=step).path == str(CLUS / f"{name}.flax") and tr.open(run).step == max(tr.steps(run))
    with pytest.raises(UnsupportedError, match=r"data/\.ATTRIBUTES/ITERATOR_STATE"):  # the name in TensorFlow
        tr.open(CLUS / f"{name}.index")


def test_a_run_of_clu_goes_on(tmp_path: Path) -> None:
    shutil.copytree(CLUS / "state", tmp_path / "run")
    for ending in ("flax", "data-00000-of-00001"):  # The next save was killed before it wrote the index.
        shutil.copy(tmp_path / "run" / f"ckpt-3.{ending}", tmp_path / "run" / f"ckpt-4.{ending}")
    template = jax.tree.map(np.zeros_like, tr.restore(CLUS / "state"))
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        state, step = ckpts.restore_or_init(lambda: template)
        assert step == 3 and state["step"] == 300
        ckpts.save(4, state)
    assert tr.steps(tmp_path / "run") == [2, 3, 4] and tr.open(tmp_path / "run").format == "treering"


def test_several_prefixes_are_named(tmp_path: Path) -> None:
    for name in ("model_9", "model_10", "ema-10", "text_1"):
        (tmp_path / name).write_bytes(b"text" if name == "text_1" else serialization.to_bytes({"w": np.ones(2)}))
    with pytest.raises(NotFoundError) as caught:
        tr.restore(tmp_path)
    assert "flax: it has files of 2 prefixes, perhaps of different runs: 'ema-', 'model_'; open" in str(caught.value)
    assert f"({tmp_path}/ema-10, {tmp_path}/model_10)" in str(caught.value)
    (tmp_path / "checkpoint_4").write_bytes(serialization.to_bytes({"w": np.ones(2)}))
    assert tr.open(tmp_path).step == 4  # Flax's default prefix has precedence.
    (tmp_path / "ema-10").unlink()
    (tmp_path / "checkpoint_4").unlink()
    assert tr.steps(tmp_path) == [9, 10]


def test_several_prefixes_of_directories_are_named(tmp_path: Path, backend: Any) -> None:
    """Flax saves through Orbax by default, which makes a directory of each step."""
    backend(True)
    for step, prefix in ((9, "model_"), (10, "model_"), (11, "ema_")):
        checkpoints.save_checkpoint(tmp_path, {"w": np.full(2, step)}, step, prefix=prefix, keep=3)
    with pytest.raises(NotFoundError) as caught:
        tr.restore(tmp_path)
    assert "orbax: it has steps of 2 prefixes, perhaps of different runs: 'ema_', 'model_'; open" in str(caught.value)
    assert f"({tmp_path}/ema_11, {tmp_path}/model_10)" in str(caught.value)
    assert tr.restore(tmp_path / "model_10")["w"][0] == 10
    checkpoints.save_checkpoint(tmp_path, {"w": np.full(2, 4)}, 4)
    assert tr.steps(tmp_path) == [4] and tr.restore(tmp_path)["w"][0] == 4  # Flax's default prefix has precedence.
    shutil.rmtree(tmp_path / "ema_11")
    shutil.rmtree(tmp_path / "checkpoint_4")
    assert tr.steps(tmp_path) == [9, 10]


@pytest.mark.parametrize("names", [["ckpt_0.5", "ckpt_2.25"], ["ckpt_1", "ckpt_2.25"], ["checkpoint_2.25", "x_1"]])
def test_latest_step_that_is_not_an_integer_is_named(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_bytes(serialization.to_bytes({"w": np.full(2, len(name))}))
    latest = next(name for name in names if name.endswith("_2.25"))
    assert tr.steps(tmp_path) == []
    with pytest.raises(NotFoundError, match=rf"flax: the latest step, {latest}, is not an integer; open a f"):
        tr.open(tmp_path)
    assert tr.open(tmp_path / latest).step is None
    assert tr.restore(tmp_path / latest)["w"].tolist() == [len(latest)] * 2


def test_only_files_of_flax_are_steps(tmp_path: Path) -> None:
    (tmp_path / "checkpoint_1").mkdir()
    (tmp_path / "checkpoint_2").write_bytes(b"text")
    (tmp_path / "checkpoint_4").write_bytes(pickle.dumps({"w": 1}))
    (tmp_path / "checkpoint_5_gda").mkdir()
    assert tr.steps(tmp_path) == []
    (tmp_path / "checkpoint_0").write_bytes(serialization.to_bytes({"w": 1}))
    assert tr.steps(tmp_path) == [0] and tr.open(tmp_path)["w"] == 1
    (tmp_path / "checkpoint_6").write_bytes(serialization.to_bytes({"w": np.ones(9)})[:-1])
    assert tr.open(tmp_path).step == 0  # The newest step is damaged.
    with pytest.raises(CorruptError, match="checkpoint_6"):
        tr.open(tmp_path, step=6)


# Lazy


def sparse(path: Path) -> None:
    """Writes a sparse file of 24 GB with arrays of 16 and 8 GB, which takes almost no room on the disk."""
    with open(path, "wb") as file:

        def part(shape: list[int], dtype: str, nbytes: int) -> None:
            head = b"\x93" + msgpack.packb(shape) + msgpack.packb(dtype) + b"\xc6" + struct.pack(">I", nbytes)
            file.write(b"\xc9" + struct.pack(">Ib", len(head) + nbytes, 1) + head)
            file.seek(nbytes, 1)

        def array(shape: list[int], count: int) -> None:
            sizes = {str(n): size for n, size in enumerate(shape)}
            file.write(b"\x83" + msgpack.packb("__msgpack_chunked_array__") + b"\xc3" + msgpack.packb("shape"))
            file.write(msgpack.packb(sizes) + msgpack.packb("chunks") + b"\xde" + struct.pack(">H", count))
            for n in range(count):
                file.write(msgpack.packb(str(n)))
                part([1 << 29], "bfloat16", 1 << 30)

        file.write(b"\x83" + msgpack.packb("large"))
        array([1 << 23, 1 << 10], 16)
        file.write(msgpack.packb("other"))
        array([1 << 32], 8)
        file.write(msgpack.packb("step") + b"\x07")


def test_opening_reads_only_structure_and_a_slice_only_itself(tmp_path: Path, use_disk: Any) -> None:
    sparse(tmp_path / "x.msgpack")
    disk = use_disk(Counting())
    ckpt = tr.open(tmp_path / "x.msgpack")
    assert ckpt["step"] == 7 and ckpt["large"].shape == (1 << 23, 1 << 10) and ckpt["other"].nbytes == 8 << 30
    assert disk.count < 400_000  # 24 extensions
    disk.count = 0
    row = (1 << 19) * 7  # where the eighth chunk begins
    assert ckpt["large"][row - 1 : row + 1, 5:].shape == (2, 1019)
    assert 4_000 < disk.count < 5_000
    disk.count = 0
    assert not ckpt["other"][-3:].any() and disk.count == 6


def test_small_arrays_are_batched_and_large_ones_skipped(tmp_path: Path, use_disk: Any) -> None:
    """One call reads many small arrays, and the bytes of unwanted large arrays between them are not read."""
    small = {f"l{n:03d}": np.full(100, n, np.float32) for n in reversed(range(500))}  # not in the order of templates
    large = {f"l{n:03d}": np.full((100, 100), n, np.float64) for n in range(100)}
    both = {key: {"small": small[key], "large": large[key]} for key in large}
    for name, tree in (("small", small), ("large", large), ("both", both)):
        (tmp_path / f"{name}.msgpack").write_bytes(serialization.to_bytes(tree))
    disk = use_disk(Counting())
    for like in (None, small):
        disk.calls = disk.count = 0
        found = tr.restore(tmp_path / "small.msgpack", like=like)
        assert_equal({key: found[key] for key in small}, small)
        assert disk.calls < 30 and disk.count < 3 * 500 * 400
    disk.count = 0
    ckpt = tr.open(tmp_path / "large.msgpack")
    assert disk.count < 400_000  # Most of these bytes are read to recognize the format.
    assert_equal(ckpt.restore(), large)
    ckpt = tr.open(tmp_path / "both.msgpack")
    disk.count = 0
    like = {key: {"small": small[key]} for key in large}
    assert_equal(ckpt.restore(like=like, extra="ignore"), like)
    assert disk.count == 100 * 400


def test_small_arrays_own_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_SMALL_ARRAY_BYTES", 64), ("_MAX_SMALL_GAP_BYTES", 48), ("_BATCH_BYTES", 128)):
        monkeypatch.setattr(extents, name, value)
    draw = np.random.default_rng(0)
    sizes = [*range(14, 19), *draw.integers(0, 20, 40).tolist()]  # Up to 16 floats, an array is small in this test.
    tree = {f"l{n:02d}": draw.random(size, np.float32) for n, size in enumerate(sizes)}
    path = tmp_path / "x.msgpack"
    path.write_bytes(serialization.to_bytes(tree))
    backwards = dict(reversed(tree.items()))
    for found in (tr.restore(path), tr.restore(path, like=backwards)):
        assert_equal({key: found[key] for key in tree}, tree)
        for key, array in found.items():
            assert array.flags.writeable and (array.base is None or array.base.nbytes < 200), key
            array += 1
        assert_equal({key: found[key] - 1 for key in tree}, {key: (array + 1) - 1 for key, array in tree.items()})


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class RecordingWriter:
        def __init__(self, reader: Any):
            self.reader = reader

        def __getattr__(self, name: str) -> Any:
            return getattr(self.reader, name)

        def read(self, wanted: Any, **more: Any) -> Any:
            found = self.reader.read(wanted, **more)
            sizes.append(sum(array.nbytes for array in found))
            return found

    for limit in ("_SLICE_BYTES", "_SMALL_BYTES", "_BATCH_BYTES"):
        monkeypatch.setattr(state_dict_write, limit, 1 << 16)
    tree = {"w": np.random.default_rng(0).random((100, 1000)), "long": np.arange(100_000)}
    tr.save(tmp_path / "native", tree)
    reader: Any = RecordingWriter(tr.open(tmp_path / "native")._source)
    size = formats.get("flax").write(stores.get(""), str(tmp_path / "x.msgpack"), reader, overwrite=False)
    assert max(sizes) <= 1 << 16 and sum(sizes) == 1_600_000
    assert size == os.path.getsize(tmp_path / "x.msgpack")
    assert_equal(tr.restore(tmp_path / "x.msgpack"), {"long": tree["long"], "w": tree["w"]})


# State dicts in several files


def save_shards(folder: Path, tree: Any, flat: bool = False) -> dict[str, Any]:
    """Writes a folder as Hugging Face does: one file per leaf, nested or flat, and an index with flat names."""
    leaves = flax.traverse_util.flatten_dict(tree, sep="/")
    places = {}
    for n, (key, leaf) in enumerate(leaves.items()):
        name = f"flax_model-0000{n + 1}-of-0000{len(leaves)}.msgpack"
        places[key] = name
        nested = {key: leaf} if flat else flax.traverse_util.unflatten_dict({key: leaf}, sep="/")
        (folder / name).write_bytes(serialization.to_bytes(nested))
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "flax_model.msgpack.index.json").write_text(json.dumps(index))
    return places


@pytest.mark.parametrize("flat", [False, True])
def test_a_folder_with_an_index(tmp_path: Path, flat: bool) -> None:
    tree = {"a": {"kernel": every_bit(np.dtype("f4")), "~": np.arange(3)}, "b": {"c": {"d": np.float32(2)}}}
    places = save_shards(tmp_path, tree, flat)
    ckpt = tr.open(tmp_path)
    assert ckpt.format == "flax" and list(ckpt) == ["a/kernel", "a/~0", "b/c/d"]
    assert ckpt.nbytes == sum(os.path.getsize(tmp_path / name) for name in places.values())
    assert_equal(ckpt.restore(), tree)
    (tmp_path / places["b/c/d"]).unlink()
    with pytest.raises(CorruptError, match=r"flax_model-00003-of-00003\.msgpack: expected the file that .* names"):
        tr.restore(tmp_path)
    assert_equal(tr.restore(tmp_path, at="a"), tree["a"])


def test_a_folder_of_hugging_face(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "treering")
    tree = {"a": {"kernel": every_bit(np.dtype("f4"))}, "7": np.arange(3)}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "flax_model.msgpack").write_bytes(serialization.to_bytes(tree))
    ckpt = tr.open(tmp_path)
    assert (ckpt.format, ckpt.path, ckpt.step) == ("flax", str(tmp_path), None)
    assert ckpt.nbytes == os.path.getsize(tmp_path / "flax_model.msgpack") and not tr.steps(tmp_path)
    assert_equal(ckpt.restore(), tree)
    assert all("restored" in record.getMessage() for record in caplog.records)
    caplog.clear()
    save_file({"other": np.ones(3)}, tmp_path / "model.safetensors")
    places = save_shards(tmp_path, {"b": np.ones(2), "c": np.zeros(3)})
    for name, names in [
        ("", ["other"]),
        ("model.safetensors", ["other"]),
        ("flax_model.msgpack", [*tree, "a/kernel"][1:]),
        ("flax_model.msgpack.index.json", list(places)),
    ]:
        assert sorted(tr.open(tmp_path / name)) == sorted(names)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{tmp_path}: opens model.safetensors; open the others by their own paths: flax_model.msgpack, "
        "flax_model.msgpack.index.json"
    )


def test_an_index_that_lies(tmp_path: Path) -> None:
    places = save_shards(tmp_path, {"a": np.ones(2), "b": np.ones(3)})
    index = tmp_path / "flax_model.msgpack.index.json"

    def write(weights: Any) -> None:
        index.write_text(json.dumps({"weight_map": weights}))

    write({**places, "c": places["a"]})
    with pytest.raises(CorruptError, match="expected the leaf 'c', which the index places in this file"):
        tr.restore(tmp_path)
    write({"a": places["a"]})
    assert list(tr.open(tmp_path)) == ["a"]
    write({"b": places["a"]})
    with pytest.raises(CorruptError, match="expected no leaf a"):
        tr.open(tmp_path)
    for name in ("../x", "/etc/passwd", "", ".", "..", "a/b", "a\0b", "x" * 300):
        write({"a": name})
        with pytest.raises(UnsafeError if name != "a/b" else CorruptError):
            tr.restore(tmp_path)
    for text in ("", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{" * 9999, "\0"):
        index.write_text(text)
        with pytest.raises(CorruptError):
            tr.open(tmp_path)
    index.write_bytes(b"\xff{}")
    with pytest.raises(CorruptError):
        tr.open(tmp_path)
    (tmp_path / "s1").write_bytes(serialization.to_bytes({"a": np.ones(2)}))
    (tmp_path / "s2").write_bytes(serialization.to_bytes({"a": {"b": np.ones(2)}}))
    write({"a": "s1", "a/b": "s2"})
    with pytest.raises(CorruptError, match="a is a leaf and also has leaves below it, such as a/b"):
        tr.open(tmp_path)


def save_separate_array(path: Path, name: str, array: Any) -> None:
    """Writes an array next to a checkpoint, as Flax and JAX do for a job of several processes."""
    place = f"{path}_gda/{name}" if name else f"{path}_gda"
    os.makedirs(place)
    asyncio.run(async_serialize(jnp.asarray(array), get_tensorstore_spec(place)))


@pytest.mark.long
@pytest.mark.whole
def test_arrays_of_several_processes_in_a_store(tmp_path: Path) -> None:
    w = np.arange(40, dtype=np.float32).reshape(8, 5)
    save_separate_array(tmp_path / "checkpoint_20", "params/w", w)
    tree = {"params": {"w": "//GDAPlaceholder:params/w"}}
    (tmp_path / "checkpoint_20").write_bytes(serialization.to_bytes(tree))
    store = MemoryStore()
    stores.register(store, "flax-arrays")
    for file in filter(Path.is_file, tmp_path.rglob("*")):
        with store.new_file(f"flax-arrays://bucket/{file.relative_to(tmp_path)}", overwrite=False) as copy:
            copy.write(file.read_bytes())
    assert_equal(tr.restore("flax-arrays://bucket"), {"params": {"w": w}})


def test_arrays_of_several_processes(tmp_path: Path) -> None:
    path, w = tmp_path / "checkpoint_20", np.arange(40, dtype=np.float32).reshape(8, 5)
    save_separate_array(path, "params/w", w)
    save_separate_array(path, "params/a~b", w.astype(jnp.bfloat16))
    save_separate_array(path, "count", np.int32(4))
    tree = {
        "params": {"w": "//GDAPlaceholder:params/w", "a~b": "//GDAPlaceholder:params/a~b", "here": w[0]},
        "count": "//GDAPlaceholder:count",
        "text": "GDAPlaceholder",
    }
    path.write_bytes(serialization.to_bytes(tree))
    assert tr.steps(tmp_path) == [20]
    ckpt = tr.open(tmp_path)
    params = {"w": w, "a~b": w.astype(jnp.bfloat16), "here": w[0]}
    expected = {"params": params, "count": np.array(4, np.int32), "text": "GDAPlaceholder"}
    assert_equal(ckpt.restore(), expected)
    assert ckpt["params/w"][2:4, 1].tolist() == [11, 16] and ckpt.nbytes > path.stat().st_size + 160
    tr.convert(path, tmp_path / "x.msgpack")
    assert_equal(serialization.msgpack_restore((tmp_path / "x.msgpack").read_bytes()), expected)
    os.unlink(f"{path}_gda/params/w/0.0")
    with pytest.raises(CorruptError, match=r"w/0\.0: expected a chunk"):
        tr.restore(path)
    os.unlink(f"{path}_gda/params/w/.zarray")
    with pytest.raises(CorruptError, match="params/w"):
        tr.restore(path)
    with pytest.raises(NotFoundError, match=r"arrays of the checkpoint in .*checkpoint_20; open that file"):
        tr.open(f"{path}_gda")


def test_a_lone_array_of_several_processes(tmp_path: Path) -> None:
    save_separate_array(tmp_path / "checkpoint_1", "", np.arange(4))
    (tmp_path / "checkpoint_1").write_bytes(serialization.to_bytes("//GDAPlaceholder:"))
    path = tmp_path / "x.msgpack"
    (tmp_path / "checkpoint_1").rename(path)
    (tmp_path / "checkpoint_1_gda").rename(f"{path}_gda")
    assert tr.restore(path).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/../../b", ".", "a\0", "x" * 300])
def test_arrays_outside_are_not_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "c").write_bytes(serialization.to_bytes({"w": f"//GDAPlaceholder:{name}"}))
    with pytest.raises(UnsafeError, match=r"c: w: .*expected the name of something in this folder"):
        tr.open(tmp_path / "c")


# Files that Flax refuses


def test_what_it_refuses(tmp_path: Path) -> None:
    flax_format = formats.get("flax")

    def refused(data: bytes, name: str = "x") -> str | None:
        (tmp_path / name).write_bytes(data)
        return flax_format.refuses(stores.get(""), str(tmp_path / name))

    header = b'{"__metadata__":{}}'.ljust(0xA188)
    others = [
        b"",
        b"text",
        b"{}",
        b"\x93NUMPY\x01\0",
        b"\x89PNG\r\n",
        b"\x89HDF\r\n",
        pickle.dumps({"a": np.ones(3)}),
        b"\x80",
        b"\x81\xa1",
        b"\xc7\x05\x09abcde",
        len(header).to_bytes(8, "little") + header,
        msgpack.packb([["a"], b"\xc0"]),
        b"\xff" * 100,
    ]
    for data in others:
        expected = None if data == b"\x80" else "it does not begin like a state dict in MessagePack"
        assert refused(data) == expected, data[:20]
    assert refused(serialization.to_bytes({"a": 1})) is None
    assert refused(serialization.to_bytes(np.ones(3))) is None
    assert refused(serialization.to_bytes({})) is None
    assert refused(serialization.to_bytes([np.ones(3)])) is None
    assert refused(b"\x05", "x.msgpack") is None and refused(b"\xc1", "x.msgpack") is not None
    assert "nothing" in str(flax_format.refuses(stores.get(""), str(tmp_path / "absent")))
    assert "folder without" in str(flax_format.refuses(stores.get(""), str(tmp_path)))
    assert flax_format.refuses(stores.get(""), str(tmp_path / ("n" * 300))) is not None
    os.mkfifo(tmp_path / "pipe")
    assert flax_format.refuses(stores.get(""), str(tmp_path / "pipe")) is not None


def test_what_orbax_wrote_for_flax_is_not_ours(tmp_path: Path, backend: Any) -> None:
    backend(True)
    path = checkpoints.save_checkpoint(tmp_path, {"w": jnp.ones(3)}, 4)
    assert "folder" in str(formats.get("flax").refuses(stores.get(""), path))
    assert formats.get("flax").steps(stores.get(""), str(tmp_path), os.listdir(tmp_path)) == {}


# Bad files

EXT = {1: [[2], "float32", bytes(8)], 2: [1.0, 2.0], 3: [[], "float32", bytes(4)]}


def ext(code: int, payload: Any) -> bytes:
    return msgpack.packb(msgpack.ExtType(code, msgpack.packb(payload)))


def chunked(**changes: Any) -> bytes:
    chunk = msgpack.ExtType(1, msgpack.packb([[2], "int8", b"12"]))
    valid = {"__msgpack_chunked_array__": True, "shape": {"0": 2, "1": 2}, "chunks": {"0": chunk, "1": chunk}}
    return msgpack.packb({**valid, **changes})


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (ext(1, [[3], "float32", bytes(8)]), CorruptError, r"expected 12 bytes of float32\[3\], found 8"),
        (ext(1, [[-2], "float32", bytes(8)]), CorruptError, "sizes of an array's axes"),
        (ext(1, [[2.0], "float32", bytes(8)]), CorruptError, "sizes"),
        (ext(1, [[True, 2], "float32", bytes(8)]), CorruptError, "sizes"),
        (ext(1, [[2**63, 2**63], "float32", bytes(8)]), CorruptError, "expected"),
        (ext(1, [[0, 2**63, 2**63], "float32", b""]), UnsafeError, "no array can have"),
        (ext(1, [[1] * 65, "float32", bytes(4)]), CorruptError, "sizes"),
        (ext(1, [[2], "object", bytes(8)]), UnsupportedError, "dtype object"),
        (ext(1, [[2], "float99", bytes(8)]), UnsupportedError, "dtype float99"),
        (ext(1, [[2], "str0", b""]), UnsupportedError, "dtype <U0"),
        (ext(1, [[1], "datetime64[fortnight]", bytes(8)]), UnsupportedError, "datetime64"),
        (ext(1, [[2], 5, bytes(8)]), CorruptError, "expected .shape, dtype, bytes."),
        (ext(1, [[2], "float32", "12345678"]), CorruptError, "expected .shape, dtype, bytes."),
        (ext(1, [[2], "float32"]), CorruptError, "expected .shape"),
        (ext(1, {"shape": [2]}), CorruptError, "expected .shape"),
        (ext(1, msgpack.ExtType(1, b"\x90")), CorruptError, "expected .shape"),
        (msgpack.packb(msgpack.ExtType(1, b"")), CorruptError, "ends at"),
        (msgpack.packb(msgpack.ExtType(1, b"\x90\x90")), CorruptError, "expected a value that ends at"),
        (ext(2, [1.0]), CorruptError, "real, imaginary"),
        (ext(2, [1.0, "2"]), CorruptError, "real, imaginary"),
        (ext(3, [[2], "float32", bytes(4)]), CorruptError, "expected 8 bytes"),
        (ext(4, EXT[1]), UnsupportedError, "type 1, 2 or 3, as Flax has, found 4"),
        (msgpack.packb(msgpack.Timestamp(1)), UnsupportedError, "found -1"),
        (chunked(chunks={}), CorruptError, "the chunks of a large array"),
        (chunked(chunks={"0": 1}), CorruptError, "the chunks of a large array"),
        (chunked(chunks=[1]), CorruptError, "the chunks of a large array"),
        (chunked(shape={"1": 2}), CorruptError, "the chunks of a large array"),
        (chunked(shape={"0": 5}), CorruptError, r"expected 5 bytes of int8\[5\], found 4"),
        (b"\xc1", CorruptError, "0xc1"),
        (b"\xa2\xff\xff", CorruptError, "UTF-8"),
        (b"\xdb\xff\xff\xff\xff", CorruptError, "cut short"),
        (b"\xc6\xff\xff\xff\xff", CorruptError, "cut short"),
        (b"\xc9\xff\xff\xff\xff\x01", CorruptError, "cut short"),
        (b"\xdd\xff\xff\xff\xff", CorruptError, "cut short"),
        (b"\xdf\xff\xff\xff\xff", CorruptError, "cut short"),
        (b"\x82\xa1a\x01\xa1a\x02", CorruptError, "key 'a' twice"),
        (b"\x82\x01\x01\xa11\x02", CorruptError, "read the same"),
        (b"\x82\x01\x01\xc3\x02", CorruptError, "key True twice"),
        (b"\x81\xc0\x01", CorruptError, "expected a key, found nil"),
        (b"\x81\x90\x01", CorruptError, "expected a key, found an array"),
        (b"\x81\x80\x01", CorruptError, "expected a key, found a map"),
        (b"\x91" * 1001 + b"\x01", UnsafeError, "more than 1000 deep"),
        (b"\x81\x01" * 1001 + b"\x01", UnsafeError, "more than 1000 deep"),
        (b"\x01\x01", CorruptError, "expected a value that ends at"),
    ],
)  # fmt: skip
def test_malformed_values(tmp_path: Path, value: bytes, kind: type, text: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\x81\xa3key" + value)
    with pytest.raises(kind, match=text) as caught:
        tr.open(path)
    assert type(caught.value) is kind and str(path) in str(caught.value)


def test_trees_as_deep_as_they_may_be(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\x81\xa1a" * 1000 + b"\x01")
    ckpt = tr.open(path)
    assert list(ckpt) == ["/".join("a" * 1000)] and list(ckpt.values()) == [1]
    assert isinstance(tr.restore(path), dict) and str(ckpt)
    with pytest.raises(UnsupportedError, match="500 levels deep"):
        tr.convert(path, tmp_path / "y.msgpack")


def test_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.msgpack"
    with open(path, "wb") as file:  # A sparse file of four gigabytes of zeros, each of which is an int.
        file.write(b"\xdd" + struct.pack(">I", 2**32 - 1))
        file.truncate(2**32 + 4)
    with pytest.raises(UnsafeError, match="at most 1048576 values"):
        tr.open(path)
    with open(path, "wb") as file:  # A text of three gigabytes.
        file.write(b"\xdb" + struct.pack(">I", 3 << 30))
        file.truncate((3 << 30) + 5)
    with pytest.raises(UnsafeError, match="bytes of text"):
        tr.open(path)
    with open(path, "wb") as file:  # Bytes are a leaf, which Treering would hold in memory.
        file.write(b"\xc6" + struct.pack(">I", 3 << 30))
        file.truncate((3 << 30) + 5)
    with pytest.raises(UnsafeError, match="bytes of text"):
        tr.open(path)
    # A small file whose paths would take a gigabyte together.
    path.write_bytes(b"\x81\xda\xff\xff" + b"k" * 65535 + b"\xdd" + struct.pack(">I", 20_000) + bytes(20_000))
    with pytest.raises(UnsafeError, match="expected paths of at most"):
        tr.open(path)


@pytest.mark.slow
def test_damage_anywhere(tmp_path: Path) -> None:
    tree = {
        "a": {"w": np.arange(3, dtype=np.int16), "s": np.float32(1), "e": {}},
        "b": [1.5, None, True, 2**40, "text", b"bytes", 1j],
        "opt": {"name": "N", "fields": {"0": "x"}, "values": {"0": 1}},
    }
    data = serialization.to_bytes(tree)
    path = tmp_path / "x.msgpack"
    seen = set()
    for bad in damaged(data):
        path.write_bytes(bad)
        seen.add(outcome(path))
    assert seen == {"fine", "CorruptError", "UnsupportedError"}


@pytest.mark.slow
def test_arrays_that_begin_alike_are_tested_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"a": {"x": np.int8([1, 2]), "y": np.int8([3, 4]), "z": np.int8([5, 6])}, "b": np.int8([7, 8]), "c": 1.5}
    data = serialization.to_bytes(tree)
    path = tmp_path / "x.msgpack"

    def all_of(data: bytes) -> list[Any]:
        path.write_bytes(data)
        try:
            found = tr.restore(path)
        except TreeringError as error:
            return [type(error), str(error)]
        return [repr(found)]

    files = [data, data.replace(b"\xa1y", b"\xa1x"), data.replace(b"\xa1y", b"\xa1\xff"), *damaged(data)]
    quickly = [all_of(one) for one in files]
    monkeypatch.setattr(msgpack_scanner, "_MAX_PREFIXES", 0)
    for one, found in zip(files, quickly, strict=True):
        assert all_of(one) == found, one
    assert "key 'x' twice" in quickly[1][1] and "UTF-8" in quickly[2][1]


@pytest.mark.long
def test_damage_to_large_arrays(tmp_path: Path) -> None:
    data = b"\x82\xa1w" + chunked() + b"\xa1g" + msgpack.packb("//GDAPlaceholder:g")
    path = tmp_path / "x.msgpack"
    path.write_bytes(data)
    save_separate_array(path, "g", np.arange(3))
    assert outcome(path) == "fine"
    for bad in damaged(data):
        path.write_bytes(bad)
        outcome(path)


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.builds(every_bit, st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3).map(tuple)),
    lambda children: st.dictionaries(st.text(max_size=4), children, max_size=4),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(tree=st.dictionaries(st.text(max_size=4), TREES, max_size=4), seed=st.integers(0, 2**32))
def test_any_tree_and_any_damage(tmp_path_factory: pytest.TempPathFactory, tree: Any, seed: int) -> None:
    folder = tmp_path_factory.mktemp("any")
    check_both_ways(folder, tree)
    path = folder / "x.msgpack"
    for n in range(5):
        path.write_bytes(shuffled(serialization.to_bytes(tree), seed + n))
        outcome(path)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=60))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.msgpack"
    path.write_bytes(data)
    outcome(path)


def test_a_file_that_shrinks_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "x.msgpack"
    path.write_bytes(serialization.to_bytes({"w": np.ones(10_000)}))
    ckpt = tr.open(path)
    os.truncate(path, 100)
    with pytest.raises(NotFoundError, match="another program wrote into it while it was open"):
        ckpt["w"][:]


# Writing


def test_leaves_that_it_cannot_hold_are_all_named(tmp_path: Path) -> None:
    tree = {
        "key": jax.random.key(0),
        "int": 2**64,
        "low": -(2**63) - 1,
        "text": np.array(["abc"]),
        "raw": np.array([b"abc"]),
        "gda": "//GDAPlaceholder:x",
        "ok": 2**64 - 1,
        "in": {"__msgpack_chunked_array__": 1},
    }
    with pytest.raises(UnsupportedError) as caught:
        tr.save(tmp_path / "x.msgpack", tree)
    text = str(caught.value)
    for name in ("key", "int", "low", "text", "raw", "gda", "in/__msgpack_chunked_array__"):
        assert f"  {name}: " in text
    assert "  ok: " not in text and os.listdir(tmp_path) == []


def test_what_flax_gets_of_other_trees(tmp_path: Path) -> None:
    tree = {
        "big-endian": np.arange(3, dtype=">i4"),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "strided": np.arange(10)[::3],
        "jax": jnp.arange(3, dtype=jnp.int8),
        "function": len,
        2: (1, [True]),
    }
    tr.save(tmp_path / "x.msgpack", list(tree.values()))
    found = serialization.msgpack_restore((tmp_path / "x.msgpack").read_bytes())
    assert_equal(found["0"], np.arange(3, dtype="i4"))
    assert_equal(found["1"], np.arange(6).reshape(2, 3))
    assert_equal(found["2"], np.array([0, 3, 6, 9]))
    assert_equal(found["3"], np.arange(3, dtype=np.int8))
    assert found["4"] is None and found["5"] == {"0": 1, "1": {"0": True}}
    assert serialization.from_bytes([0, 0, 0, 0, 0, (2, [False])], (tmp_path / "x.msgpack").read_bytes())[5] == (
        1,
        [True],
    )


def test_writing_replaces_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.msgpack"
    tr.save(path, {"a": 1})
    with pytest.raises(ExistsError, match="overwrite=True"):
        tr.save(path, {"a": 2})
    tr.save(path, {"a": 3}, overwrite=True)
    assert serialization.msgpack_restore(path.read_bytes()) == {"a": 3} and os.listdir(path.parent) == ["x.msgpack"]
    with pytest.raises(MismatchError, match="no options of its own, found speed"):
        tr.convert(path, tmp_path / "y.msgpack", speed=1)
