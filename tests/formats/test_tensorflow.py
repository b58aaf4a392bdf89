"""TensorFlow's checkpoints.

TensorFlow is not a dependency of the tests. `real/tensorflow` has a few small files that it wrote; the writer in
`bundles` makes all others.
"""

import json
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import treering as tr
from hostile_input import damaged, outcome, shuffled
from tensorflow_bundles import (
    CODES,
    MAGIC,
    Bundle,
    Part,
    data_block,
    field,
    part_key,
    shape_of,
    slow_crc,
    snappy,
    sortable,
    table,
    varint,
)
from treering import formats, rules, stores
from treering.errors import CorruptError, MismatchError, TreeringError, UnsafeError, UnsupportedError
from treering.formats.t5_names import T5_TO_T5X
from treering.formats.tensorflow.table import crc32c, masked
from treering.stores.posix import Disk

REAL = Path(__file__).parent.parent / "real" / "tensorflow"


def noise(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    dtype = np.dtype(dtype)
    count = int(np.prod(shape, dtype=int))
    bits = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    if dtype.name in ("bool", "int2", "uint2", "int4", "uint4"):
        return (bits % 2).reshape(shape).astype(dtype)
    return bits.view(dtype).reshape(shape)


def same(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


# Checksums


def test_checksums() -> None:
    assert crc32c(b"123456789") == 0xE3069283 and crc32c(b"") == 0
    assert crc32c(bytes(32)) == 0x8A9136AA and crc32c(b"\xff" * 32) == 0x62A8AB43  # RFC 3720
    # These are 0.0, 0.9, 0.999 and 0.001 from a checkpoint of Adam's settings that TensorFlow wrote.
    for number, stored in [(0.0, 974224294), (0.9, 3754421245), (0.999, 3657100731), (0.001, 844483433)]:
        assert masked(crc32c(np.float32(number).tobytes())) == stored == slow_crc(np.float32(number).tobytes())


@pytest.mark.parametrize("size", [1, 511, 512, 513, 16_383, 16_384, 16_389, 600_000])
def test_checksums_of_long_data(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    assert crc32c(data[size // 3 :], crc32c(data[: size // 3])) == crc32c(data)
    if size < 20_000:
        assert masked(crc32c(data)) == slow_crc(data)
    flipped = bytearray(data)
    flipped[size // 2] ^= 1
    assert crc32c(bytes(flipped)) != crc32c(data)


# Reading


@pytest.mark.parametrize("align", [1, 64])
@pytest.mark.parametrize("mmap", [None, True, False])
def test_every_dtype(tmp_path: Path, mmap: bool | None, align: int) -> None:
    bundle = Bundle(align=align)
    arrays = {
        f"{name}/{n}": noise(dtype_of(name), shape, n) for name in CODES for n, shape in enumerate([(3, 5), (), (0, 4)])
    }
    for name, array in arrays.items():
        bundle.add(name, array)
    path = bundle.save(tmp_path / "model.ckpt-7")
    ckpt = tr.open(path)
    assert ckpt.format == "tensorflow" and ckpt.step == 7 and set(ckpt) == set(arrays)
    assert ckpt.nbytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert all(same(ckpt[name][...], array) for name, array in arrays.items())
    found = tr.restore(path, mmap=mmap)
    for name, array in arrays.items():
        kind, n = name.split("/")
        assert same(found[kind][int(n)], array) and found[kind][int(n)].flags.aligned
        assert found[kind][int(n)].flags.writeable
    assert tr.verify(path).ok
    for code, name in [(11, "int8"), (12, "uint8"), (13, "int32"), (15, "int16"), (16, "uint16")]:  # quantized
        bundle.add("q", noise(dtype_of(name), (4,)), code=code)
        assert same(tr.open(bundle.save(tmp_path / "q"))["q"][...], noise(dtype_of(name), (4,)))


def test_big_endian_files(tmp_path: Path) -> None:
    bundle = Bundle(big=True)
    arrays = {name: noise(dtype_of(name), (3, 2)) for name in CODES}
    for name, array in arrays.items():
        bundle.add(name, array)
    bundle.add_text("text", [b"abc", b""], (2,))
    ckpt = tr.open(bundle.save(tmp_path / "x"))
    assert all(same(ckpt[name][...], array) for name, array in arrays.items())
    assert ckpt["text/0"] == b"abc" and ckpt["text/1"] == b"" and ckpt.step is None


def test_several_files_of_data_and_odd_names(tmp_path: Path) -> None:
    names = [
        "a",
        "a.b/c",
        "é/ü",
        "~",
        "x~1/y",
        "/z",
        "model/.ATTRIBUTES/VARIABLE_VALUE",
        *(f"l{n:03}/w" for n in range(60)),
    ]
    bundle = Bundle(shards=3)
    arrays = {name: noise(np.float32, (n % 4, 3), n) for n, name in enumerate(names)}
    for n, (name, array) in enumerate(arrays.items()):
        bundle.add(name, array, shard=n % 3)
    ckpt = tr.open(bundle.save(tmp_path / "x"))
    assert set(ckpt) == {name.replace("~", "~0") for name in names}
    assert all(same(ckpt[name.replace("~", "~0")][...], array) for name, array in arrays.items())
    os.unlink(tmp_path / "x.data-00001-of-00003")
    with pytest.raises(CorruptError, match=r"x\.data-00001-of-00003: expected the file that x\.index names"):
        tr.restore(tmp_path / "x.index")


@pytest.mark.parametrize("per_block", [1, 3, 1000])
@pytest.mark.parametrize("compress", [None, snappy])
def test_tables_of_any_shape(tmp_path: Path, per_block: int, compress: Any) -> None:
    bundle = Bundle()
    for n in range(50):
        bundle.add(f"encoder/block_{n // 5:03}/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa/{n}", np.float32(n))
    ckpt = tr.open(bundle.save(tmp_path / "x", per_block=per_block, compress=compress))
    assert [float(array[...]) for array in ckpt.values()] == sorted(range(50), key=lambda n: (n // 5, str(n)))


_SPLITS: list[tuple[tuple[int, ...], list[Part]]] = [
    ((10, 3), [((0, 4), (0, -1)), ((4, 6), (0, -1))]),
    ((4, 6), [((0, -1), (0, 2)), ((0, -1), (2, 2)), ((0, -1), (4, 2))]),
    ((4, 6), [((2, 2), (3, 3)), ((0, 2), (0, 3)), ((0, 2), (3, 3)), ((2, 2), (0, 3))]),
    ((70_000,), [((0, 64), ), ((64, 8128),), ((8192, 61_808),)]),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize(("shape", "parts"), _SPLITS)
@pytest.mark.parametrize("big", [False, True])
def test_partitioned_variables(tmp_path: Path, shape: tuple[int, ...], parts: list[Part], big: bool) -> None:
    array = noise(np.float32, shape)
    bundle = Bundle(shards=2, big=big)
    bundle.add_parts("scope/part", array, parts, [n % 2 for n in range(len(parts))])
    bundle.add("whole", np.ones(2, np.float32))
    path = bundle.save(tmp_path / "x")
    ckpt = tr.open(path)
    assert list(ckpt) == ["scope/part", "whole"] and same(ckpt["scope/part"][...], array)
    for box in (np.s_[1:4], np.s_[3:], np.s_[..., 1:3], np.s_[2:2]):
        assert same(ckpt["scope/part"][box], array[box])
    assert same(tr.restore(path)["scope"]["part"], array) and tr.verify(path).ok


def test_the_ordered_code() -> None:
    from treering.formats.tensorflow.table import _sortable

    assert sortable(0x424242).hex() == "f0424242" and sortable(-0x800).hex() == "3800"  # TensorFlow's examples
    for number in [n + d for n in (0, 64, 8192, 2**20, 2**34, 2**62, -(2**62)) for d in (-65, -64, -1, 0, 1, 63, 64)]:
        assert _sortable(number) == sortable(number)


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    array = noise(np.float32, (6, 2))
    all_of_it = [((0, 3), (0, -1)), ((3, 3), (0, -1))]

    def opened(parts: list[Part], change: Callable[[Bundle], Any]) -> None:
        bundle = Bundle()
        bundle.add_parts("a", array, parts)
        change(bundle)
        tr.open(bundle.save(tmp_path / "x"))

    opened(all_of_it, lambda bundle: None)
    holes: list[list[Part]] = [
        [((0, 3), (0, -1))],
        [((0, 3), (0, -1)), ((4, 2), (0, -1))],
        [((0, 4), (0, -1)), ((3, 3), (0, -1))],
        [((0, 3), (0, 1)), ((3, 3), (0, 2))],
    ]
    for parts in [*holes, [((0, 6),)], [((0, 3), (0, -1)), ((3, 4), (0, -1))]]:
        with pytest.raises(CorruptError):
            opened(parts, lambda bundle: None)
    with pytest.raises(CorruptError, match="expected an entry"):
        opened(all_of_it, lambda bundle: bundle.pairs.pop(part_key("a", all_of_it[0])))
    for other in (np.ones((3, 2)), np.ones((2, 2), np.float32), np.ones(6, np.float32)):
        with pytest.raises(CorruptError, match="another dtype or size"):
            opened(all_of_it, lambda bundle, own=other: bundle.add(part_key("a", all_of_it[0]), own))


def test_text_becomes_bytes(tmp_path: Path) -> None:
    bundle = Bundle()
    bundle.add_text("graph", [b"\0\xff" * 500], ())
    bundle.add_text("table", [b"a", b"", b"long" * 40, b"d", b"e", b"f"], (2, 3))
    bundle.add_text("none", [], (0, 3))
    bundle.add("w", np.ones(2, np.float32))
    path = bundle.save(tmp_path / "x")
    ckpt = tr.open(path)
    assert ckpt["graph"] == b"\0\xff" * 500
    assert [ckpt[f"table/{i}/{j}"] for i in range(2) for j in range(3)] == [b"a", b"", b"long" * 40, b"d", b"e", b"f"]
    assert set(ckpt) - {"graph", "w"} == {f"table/{i}/{j}" for i in range(2) for j in range(3)}
    data = tmp_path / "x.data-00000-of-00001"
    good = data.read_bytes()
    for position in (0, 3, 600, len(good) - 12):
        data.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(CorruptError):
            tr.restore(path)
        (problem,) = tr.verify(path).problems
        assert problem.leaves[0] in ("graph", "table", "none", "w") and same(tr.open(path)["w"][...], np.ones(2, "f4"))


def test_what_has_no_dtype_here_is_named(tmp_path: Path) -> None:
    bundle = Bundle()
    bundle.add("a", np.ones(2, np.float32))
    for name, code in [("handle", 20), ("any/thing", 21), ("later", 99)]:
        bundle.add_bytes(name, code, (), b"abcd", 0)
    with pytest.raises(UnsupportedError) as error:
        tr.open(bundle.save(tmp_path / "x"))
    assert [line.split(":")[0].strip() for line in str(error.value).splitlines()[1:]] == [
        "any/thing",
        "handle",
        "later",
    ]


class Counting(Disk):
    nbytes = 0

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.nbytes += len(buffer)
        return super().read(fd, buffer, offset)


def test_opening_reads_the_index_alone_and_a_slice_its_rows(tmp_path: Path) -> None:
    bundle = Bundle()
    bundle.add_bytes("big", 1, (2**20, 2**10), b"", 0)
    entry = bundle.pairs[b"big"]
    bundle.pairs[b"big"] = entry[: entry.index(field(6, 0, fixed=True))] + field(5, 2**32) + field(6, 0, fixed=True)
    path = bundle.save(tmp_path / "x")
    with open(tmp_path / "x.data-00000-of-00001", "wb") as file:
        file.truncate(2**32)
    disk, format = Counting(), formats.get("tensorflow")
    assert format.refuses(stores.Filesystem(disk), str(path)) is None
    reader = format.open(stores.Filesystem(disk), str(path))
    assert disk.nbytes < 2000
    found: Any = reader.entries["big"]
    (array,) = reader.read([(found, ((5, 7), (0, 2**10)))], verify=False, mmap=False)
    assert array.shape == (2, 2**10) and disk.nbytes < 20_000


def test_checksums_are_tested_once_and_only_if_wanted(tmp_path: Path) -> None:
    bundle = Bundle()
    bundle.add("a", noise(np.float32, (100, 10)))
    bundle.add("b", noise(np.float32, (8,)))
    bundle.add_parts("c", noise(np.int8, (9,)), [((0, 4),), ((4, 5),)])
    path = bundle.save(tmp_path / "x")
    data = tmp_path / "x.data-00000-of-00001"
    disk = Counting()
    reader = formats.get("tensorflow").open(stores.Filesystem(disk), str(path))
    entry: Any = reader.entries["a"]
    before = disk.nbytes
    reader.read([(entry, ((0, 1), (0, 10)))], mmap=False)
    assert disk.nbytes - before == 4000 + 40
    reader.read([(entry, ((1, 2), (0, 10)))], mmap=False)
    assert disk.nbytes - before == 4000 + 80
    good = data.read_bytes()
    for position, name in [(0, "a"), (3999, "a"), (4000, "b"), (4033, "c"), (len(good) - 1, "c")]:
        data.write_bytes(good[:position] + bytes([good[position] ^ 4]) + good[position + 1 :])
        ckpt = tr.open(path)
        with pytest.raises(CorruptError, match=f"the bytes of {name} are not what was saved"):
            tr.restore(path)
        with pytest.raises(CorruptError):
            ckpt[name][:1]
        assert all(ckpt[other][...] is not None for other in set("abc") - {name})
        assert [problem.leaves for problem in tr.verify(path).problems] == [(name,)]
        assert tr.restore(path, verify=False).keys() == set("abc")


def test_a_template_over_devices(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    split = NamedSharding(mesh, PartitionSpec("x", "y"))
    arrays = {"a": noise(np.float32, (8, 4)), "b": noise(ml_dtypes.bfloat16, (4, 2))}
    bundle = Bundle()
    bundle.add("a", arrays["a"])
    bundle.add_parts("b", arrays["b"], [((0, 1), (0, -1)), ((1, 3), (0, -1))])
    like = {key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for key, x in arrays.items()}
    found = tr.restore(bundle.save(tmp_path / "x"), like=like)
    assert all(same(found[key], arrays[key]) and found[key].sharding == split for key in arrays)


# Runs and paths


def test_prefixes_indexes_folders_and_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    format = formats.get("tensorflow")
    for step in (0, 500, 1000):
        bundle = Bundle(shards=2)
        bundle.add("step", np.int64(step), shard=step == 500)
        bundle.save(run / f"model.ckpt-{step}")
    (run / "model.ckpt-1000.meta").write_bytes(b"x")
    assert "without a file called checkpoint" in str(format.refuses(stores.get(""), str(run)))
    (run / "checkpoint").write_text(
        'model_checkpoint_path: "/gone/elsewhere/model.ckpt-500"\nall_model_checkpoint_paths: "x"\n'
    )
    for path, step in [(run, 500), (run / "model.ckpt-0", 0), (run / "model.ckpt-1000.index", 1000)]:
        assert format.refuses(stores.get(""), str(path)) is None
        reader = format.open(stores.get(""), str(path))
        assert reader.step == step and reader.path == str(path)
        (value,) = reader.read([(reader.entries["step"], ())])  # type: ignore[list-item]
        assert int(value) == step
    names = os.listdir(run)
    assert format.steps(stores.get(""), str(run), names) == {n: f"model.ckpt-{n}.index" for n in (0, 500, 1000)}
    assert tr.steps(run) == [0, 500, 1000]
    assert tr.open(run).step == 1000 and tr.open(run, step=0).step == 0 and tr.open(run, step=500)["step"][...] == 500
    os.unlink(run / "model.ckpt-1000.data-00000-of-00002")
    assert tr.steps(run) == [0, 500, 1000] and tr.open(run).step == 500  # the latest step is damaged, which is logged
    os.unlink(run / "model.ckpt-1000.index")
    assert tr.steps(run) == [0, 500]
    with pytest.raises(UnsupportedError, match="only read"):
        tr.save(tmp_path / "x", {"a": np.ones(2)}, format="tensorflow")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"model_checkpoint_path",
        b'model_checkpoint_path: "a',
        b'model_checkpoint_path: "a\\n"',
        b"\x82\xa7version\x03",
        b'model_checkpoint_path: "none"',
        b'model_checkpoint_path: "../x"',
    ],
)
def test_folders_of_others_are_refused(tmp_path: Path, text: bytes) -> None:
    bundle = Bundle()
    bundle.add("a", np.float32(1))
    bundle.save(tmp_path / "x")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoint").write_bytes(text)
    assert formats.get("tensorflow").refuses(stores.get(""), str(tmp_path / "run"))
    (tmp_path / "y.index").write_bytes(b"x" * 100)
    (tmp_path / "z.index").write_bytes(b"")
    os.mkfifo(tmp_path / "f.index")
    for name in ("y", "y.index", "z.index", "f.index", "nothing"):
        assert formats.get("tensorflow").refuses(stores.get(""), str(tmp_path / name))


# Names of T5


def t5_names() -> dict[str, str]:
    """Returns every variable of T5 1.1 small and Adafactor's state of some, each with its name in T5X."""
    names = {"shared/embedding": "target/token_embedder/embedding", "global_step": "state/step"}
    names["decoder/logits/kernel"] = "target/decoder/logits_dense/kernel"
    norms = {
        "encoder": ["pre_attention_layer_norm", "pre_mlp_layer_norm"],
        "decoder": ["pre_self_attention_layer_norm", "pre_cross_attention_layer_norm", "pre_mlp_layer_norm"],
    }
    attention = {
        "encoder": [("SelfAttention", "attention")],
        "decoder": [("SelfAttention", "self_attention"), ("EncDecAttention", "encoder_decoder_attention")],
    }
    for tower in ("encoder", "decoder"):
        for block in range(8):
            old, new = f"{tower}/block_{block:03}", f"target/{tower}/layers_{block}"
            for n, (theirs, ours) in enumerate(attention[tower]):
                for short, long in [("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")]:
                    names[f"{old}/layer_{n:03}/{theirs}/{short}"] = f"{new}/{ours}/{long}/kernel"
            for n, norm in enumerate(norms[tower]):
                names[f"{old}/layer_{n:03}/{'rms' if block % 2 else 'layer'}_norm/scale"] = f"{new}/{norm}/scale"
            last = len(norms[tower]) - 1
            for matrix in ("wi_0", "wi_1", "wo"):
                names[f"{old}/layer_{last:03}/DenseReluDense/{matrix}/kernel"] = f"{new}/mlp/{matrix}/kernel"
        names[f"{tower}/block_000/layer_000/SelfAttention/relative_attention_bias"] = (
            f"target/{tower}/relpos_bias/rel_embedding"
        )
        names[f"{tower}/{'rms' if tower == 'encoder' else 'final_layer'}_norm/scale"] = (
            f"target/{tower}/{tower}_norm/scale"
        )
    state = "state/param_states"
    names["encoder/block_007/layer_000/SelfAttention/v_slot_vr"] = (
        f"{state}/encoder/layers_7/attention/value/kernel/v_row"
    )
    names["encoder/block_007/layer_000/SelfAttention/v_slot_vc"] = (
        f"{state}/encoder/layers_7/attention/value/kernel/v_col"
    )
    names["decoder/block_012/layer_002/DenseReluDense/wo/kernel_slot_m"] = f"{state}/decoder/layers_12/mlp/wo/kernel/m"
    names["decoder/block_010/layer_001/layer_norm/scale_slot_v"] = (
        f"{state}/decoder/layers_10/pre_cross_attention_layer_norm/scale/v"
    )
    names["shared/embedding_slot_vr"] = f"{state}/token_embedder/embedding/v_row"
    return names


@pytest.mark.long
@pytest.mark.whole
def test_names_of_t5(tmp_path: Path) -> None:
    names = t5_names()
    assert len(names) == 196
    bundle = Bundle()
    for n, name in enumerate(names):
        bundle.add(name, np.float32(n))
    path = bundle.save(tmp_path / "model.ckpt-1000000", per_block=40)
    ckpt = tr.open(path).apply(T5_TO_T5X)
    assert {path: float(ckpt[path][...]) for path in ckpt} == {new: n for n, new in enumerate(names.values())}
    found = tr.restore(path, rules=T5_TO_T5X, at="")
    assert found["target"]["decoder"]["layers_7"]["encoder_decoder_attention"]["out"]["kernel"].shape == ()
    assert found["state"]["param_states"]["token_embedder"]["embedding"].keys() == {"v_row"}


def renamed(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns what the rules turn each name into."""
    bundle = Bundle()
    for n, name in enumerate(names):
        bundle.add(name, np.float32(n))
    ckpt = tr.open(bundle.save(folder / "model.ckpt-1")).apply(T5_TO_T5X)
    return {name: path for n, name in enumerate(names) for path in ckpt if ckpt[path][...] == n}


BIAS = "layer_000/SelfAttention/relative_attention_bias"


@pytest.mark.parametrize("own", [{"encoder", "decoder"}, {"encoder"}, {"decoder"}, set[str]()])
def test_position_biases_of_each_layer_and_shared_ones(tmp_path: Path, own: set[str]) -> None:
    names: dict[str, str] = {}
    for tower in ("encoder", "decoder"):
        for layer in range(12 if tower in own else 1):
            place = f"{tower}/layers_{layer}" if tower in own else tower
            name = f"{tower}/block_{layer:03}/{BIAS}"
            names[name] = f"target/{place}/relpos_bias/rel_embedding"
            names[f"{name}_slot_v"] = f"state/param_states/{place}/relpos_bias/rel_embedding/v"
    assert renamed(tmp_path, names) == names


def test_names_of_language_models(tmp_path: Path) -> None:
    names = {
        "transformer/embedding": "target/decoder/token_embedder/embedding",
        "transformer/logits/kernel": "target/decoder/logits_dense/kernel",
        "transformer/final_layer_norm/scale": "target/decoder/decoder_norm/scale",
        "transformer/block_1/layer_000/layer_norm/scale": "target/decoder/layers_1/pre_self_attention_layer_norm/scale",
        "transformer/block_011/layer_001/rms_norm/scale": "target/decoder/layers_11/pre_mlp_layer_norm/scale",
        "transformer/block_011/layer_001/DenseReluDense/wo/kernel": "target/decoder/layers_11/mlp/wo/kernel",
        "transformer/block_000/layer_000/SelfAttention/q": "target/decoder/layers_0/self_attention/query/kernel",
        f"transformer/block_000/{BIAS}_slot_vr": "state/param_states/decoder/layers_0/relpos_bias/rel_embedding/v_row",
        f"transformer/block_003/{BIAS}": "target/decoder/layers_3/relpos_bias/rel_embedding",
    }
    assert renamed(tmp_path, names) == names


# What TensorFlow itself wrote


@pytest.mark.parametrize(("name", "step"), [("operation", None), ("t5", 1000), ("objects", 7)])
def test_files_of_tensorflow(name: str, step: int | None) -> None:
    ckpt = tr.open(REAL / name)
    assert (ckpt.format, ckpt.step) == ("tensorflow", step) and tr.verify(REAL / name).ok
    rest = set(ckpt) - {"_CHECKPOINTABLE_OBJECT_GRAPH"}
    for key, about in json.loads((REAL / "expected.json").read_text())[name].items():
        shape = tuple(about["shape"])
        if "texts" in about:
            paths = ["/".join([key, *map(str, index)]) for index in np.ndindex(shape)]
            assert [ckpt[path].hex() for path in paths] == about["texts"]
            rest -= set(paths)
            continue
        found = ckpt[key][...]
        assert (found.dtype.name, found.shape, found.tobytes().hex()) == (about["dtype"], shape, about["bytes"]), key
        half = tuple(slice(size // 2, None) for size in shape)
        assert np.array_equal(ckpt[key][half], found[half], equal_nan=found.dtype.kind == "f")
        rest.remove(key)
    assert not rest
    if step is not None:
        assert tr.steps(REAL / name) == [step]


def test_names_of_t5_in_a_file_of_tensorflow() -> None:
    found = tr.restore(REAL / "t5", rules=T5_TO_T5X)
    layer = found["target"]["encoder"]["layers_1"]
    assert layer["attention"]["out"]["kernel"].shape == (8, 4) and layer["pre_attention_layer_norm"]["scale"].size == 4
    assert found["target"]["token_embedder"]["embedding"].shape == (16, 4)
    slots = found["state"]["param_states"]["encoder"]["layers_0"]["attention"]["query"]["kernel"]
    assert {name: slot.shape for name, slot in slots.items()} == {"v_row": (4,), "v_col": (8,)}


def test_a_variable_within_another(tmp_path: Path) -> None:
    bundle = Bundle()
    for name in ("w", "w/Adam", "w/Adam_1"):  # all optimizers of TensorFlow 1 have such names
        bundle.add(name, np.float32(1))
    path = bundle.save(tmp_path / "x")
    assert list(tr.open(path)) == ["w", "w/Adam", "w/Adam_1"]
    with pytest.raises(UnsupportedError, match="w/Adam"):
        tr.restore(path)
    assert tr.restore(path, rules=[rules.drop("w/*")]) == {"w": 1.0}
    with pytest.raises(MismatchError):
        tr.restore(path, like={"w": np.float32(0)})


# Bad files


def small() -> Bundle:
    bundle = Bundle()
    bundle.add("a/b", noise(np.float32, (2, 3)))
    bundle.add("a/c", noise(np.int8, (3,)))
    bundle.add_parts("p", noise(np.int16, (4,)), [((0, 1),), ((1, 3),)])
    bundle.add_text("t", [b"x", b"yz"], (2,))
    return bundle


@pytest.mark.slow
@pytest.mark.parametrize("compress", [None, snappy])
def test_every_change_of_the_index_is_found(tmp_path: Path, compress: Any) -> None:
    path = small().save(tmp_path / "x", per_block=3, compress=compress)
    good = path.read_bytes()
    assert outcome(path) == "fine"
    for data in damaged(good):
        path.write_bytes(data)
        try:
            formats.get("tensorflow").open(stores.get(""), str(path))
        except TreeringError:
            continue
        assert data.startswith(good[:-48])  # blocks have checksums; only the bytes around the footer have none


@pytest.mark.long
def test_messages_that_lie(tmp_path: Path) -> None:
    """Damaged contents with fitting checksums raise only a `TreeringError`."""
    path = tmp_path / "x.index"
    bundle = small()
    bundle.save(tmp_path / "x")
    for key, value in list(bundle.pairs.items()):
        for data in damaged(value):
            path.write_bytes(table({**bundle.pairs, key: data}))
            try:
                reader = formats.get("tensorflow").open(stores.get(""), str(path))
                list(reader.problems())
            except TreeringError:
                pass


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        (field(1, 1) + field(2, shape_of([2**62, 2**62])), CorruptError),
        (field(1, 1) + field(2, shape_of([2**62, 0])), UnsafeError),
        (field(1, 1) + field(2, shape_of([0] * 65)), UnsafeError),
        (field(1, 1) + field(2, shape_of([-1])), UnsafeError),
        (field(1, 1) + field(2, field(3, 1)), CorruptError),
        (field(1, 1) + field(2, shape_of([2])) + field(4, 2**62) + field(5, 8), CorruptError),
        (field(1, 1) + field(2, shape_of([2])) + field(4, -8) + field(5, 8), CorruptError),
        (field(1, 1) + field(2, shape_of([2])) + field(5, 8) + field(3, 1), CorruptError),
        (field(1, 1) + field(2, shape_of([2])) + field(5, 8) + field(3, -1), CorruptError),
        (field(1, 1) + field(2, shape_of([3])) + field(5, 8), CorruptError),
        (field(1, b"x"), CorruptError),
        (field(2, 5), CorruptError),
        (field(7, 5), CorruptError),
        (b"\x0b", CorruptError),
        (b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", CorruptError),
        (b"\xff" * 11, CorruptError),
        (field(1, 7) + field(2, shape_of([2**40])) + field(5, 8), CorruptError),
        (field(1, 7) + field(5, 2**40), UnsupportedError),
    ],
)
def test_claims_that_do_harm(tmp_path: Path, entry: bytes, error: Any) -> None:
    bundle = Bundle()
    bundle.add("a", noise(np.float32, (2,)))
    bundle.pairs[b"b"] = entry
    with pytest.raises(error):
        tr.restore(bundle.save(tmp_path / "x"))


def test_tables_that_lie(tmp_path: Path) -> None:
    path = tmp_path / "x.index"

    def write(blocks: list[bytes], handles: list[bytes] | None = None) -> None:
        out, index = b"", []
        for n, one in enumerate(blocks):
            index.append((bytes([n]), varint(len(out)) + varint(len(one) - 1)))
            out += one + struct.pack("<I", slow_crc(one))
        pairs = [(bytes([n]), handle) for n, handle in enumerate(handles)] if handles else index
        ends = []
        for last in (data_block([], 1) + b"\0", data_block(pairs, 1) + b"\0"):
            ends.append(varint(len(out)) + varint(len(last) - 1))
            out += last + struct.pack("<I", slow_crc(last))
        path.write_bytes(out + b"".join(ends).ljust(40, b"\0") + MAGIC)

    def error(kind: Any, text: str) -> None:
        with pytest.raises(kind, match=text):
            formats.get("tensorflow").open(stores.get(""), str(path))

    end = struct.pack("<2I", 0, 1)
    write([data_block([(b"", field(1, 1))], 1) + b"\0"])
    assert not formats.get("tensorflow").open(stores.get(""), str(path)).entries
    write([data_block([(b"x", b"")], 1) + b"\0"])
    error(CorruptError, "without|header")
    write([data_block([(b"", b""), (b"b", b""), (b"a", b"")], 1) + b"\0"])
    error(CorruptError, "comes after")
    write([data_block([(b"", b""), (b"b", b""), (b"b", b"")], 1) + b"\0"])
    error(CorruptError, "comes after")
    write([varint(5) + varint(1) + varint(0) + b"a" + end + b"\0"])
    error(UnsafeError, "a key of 6 bytes")
    write([varint(0) + varint(1 << 20) + varint(0) + end + b"\0"])
    error(UnsafeError, "a key of 1048576 bytes")
    write([varint(0) + varint(1) + varint(1 << 40) + b"a" + end + b"\0"])
    error(CorruptError, "expected more bytes")
    write([struct.pack("<I", 2**31) + b"\0"])
    error(CorruptError, "expected more bytes")
    long = varint(0) + varint(60_000) + varint(0) + b"k" * 60_000
    write(
        [
            long
            + b"".join(
                varint(60_000 - 1) + varint(2) + varint(0) + b"k" + bytes([n // 256, n % 256])[1:] for n in range(255)
            )
            + end
            + b"\0"
        ]
    )
    error(CorruptError, "comes after|times the size|a key of")
    write([data_block([(b"", b"")], 1) + b"\0"], [varint(0) + varint(9), varint(0) + varint(9)])
    error(CorruptError, "overlap|differs|number")
    write([data_block([(b"", b"")], 1) + b"\x02"])
    error(UnsupportedError, "unknown compression 2")
    write([varint(2**40) + b"\0a" + b"\x01"])
    error(UnsafeError, "claims to grow")
    write([varint(8) + b"\0a" + b"\x02\x09\x00" + b"\x01"])
    error(CorruptError, "copies from 9 bytes before")
    write([varint(8) + b"\0a" + b"\x01"])
    error(CorruptError, "expected a block of 8 bytes, found 1")
    later = Bundle()
    later.pairs[b""] = field(1, 1) + field(3, field(1, 9) + field(2, 2))
    later.save(tmp_path / "x")
    error(UnsupportedError, "version 1 of the format, found 2")


@pytest.mark.long
@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_shuffled_files(tmp_path: Path, seed: int) -> None:
    bundle = small()
    path = bundle.save(tmp_path / "x")
    data = tmp_path / "x.data-00000-of-00001"
    if seed % 2:
        data.write_bytes(shuffled(bytes(bundle.data[0]), seed))
    else:
        key = sorted(bundle.pairs)[seed // 2 % len(bundle.pairs)]
        path.write_bytes(table({**bundle.pairs, key: shuffled(bundle.pairs[key], seed)}))
    outcome(path)
