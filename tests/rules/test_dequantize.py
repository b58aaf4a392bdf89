"""Compares weights made of codes with what the libraries that wrote the codes make of them, bit for bit.

`real/quantized` has arrays as each library stores them, and the weights that its own functions return.
"""

import itertools
import json
import logging
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import treering as tr
from helpers import REAL, assert_same
from treering import rules
from treering._core.boxes import Box
from treering.errors import CorruptError, MismatchError, UnsupportedError
from treering.formats.safetensors import read as safetensors_read

FILES = REAL / "quantized"
NOT_SAID: dict[str, dict[str, Any]] = {  # what the arrays of these files do not say
    "gptq": {"checkpoint_format": "gptq"},
    "gptq_v2": {"checkpoint_format": "gptq_v2"},
    **{f"mlx{bits}": {"bits": bits, "group_size": 32} for bits in (2, 4, 8)},
}
NAMES = sorted(path.name.removesuffix(".weights.safetensors") for path in FILES.glob("*.weights.safetensors"))


def stored(name: str) -> pathlib.Path:
    folder = FILES / name
    return folder if folder.is_dir() else FILES / f"{name}.safetensors"


def weights(name: str) -> dict[str, np.ndarray]:
    found = tr.open(FILES / f"{name}.weights.safetensors")
    return {path: np.asarray(found[path]) for path in found}


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_library(name: str, tmp_path: pathlib.Path) -> None:
    rule = rules.dequantize("**", config=NOT_SAID.get(name))
    ckpt, expected = tr.open(stored(name)).apply([rule]), weights(name)
    assert sorted(ckpt) == sorted(expected)  # and no scale, zero, shape or None is left
    rng = np.random.default_rng(0)
    for path, weight in expected.items():
        assert_same(np.asarray(ckpt[path]), weight)
        for _ in range(8):
            box = tuple(slice(*sorted(rng.integers(0, size + 1, 2))) for size in weight.shape)
            assert_same(np.asarray(ckpt[path][box]), weight[box])
    tr.convert(stored(name), tmp_path / "c", rules=[rule])
    assert_same({path: np.asarray(leaf) for path, leaf in tr.open(tmp_path / "c").items()}, expected)
    like = {
        path: jax.ShapeDtypeStruct(weight.shape, "bfloat16") for path, weight in expected.items() if "/" not in path
    }
    given = tr.restore(
        stored(name), like, rules=[rules.dequantize("**", "bfloat16", config=NOT_SAID.get(name))], extra=["*/*"]
    )
    for path in like:
        assert given[path].dtype == "bfloat16"
        assert np.allclose(given[path].astype(np.float32), expected[path].astype(np.float32), rtol=2**-7)


def test_sizes_beyond_a_part_and_parts_of_a_block() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (700, 1100), np.uint8).view(ml_dtypes.float8_e4m3fn)  # NaNs too
    scale = rng.random((6, 9), np.float32)
    expected = codes.astype(np.float32) * np.repeat(np.repeat(scale, 128, 0)[:700], 128, 1)[:, :1100]
    words = rng.integers(0, 2**32, (1000, 136), np.uint32)
    nibbles = (words[:, :, None] >> np.arange(0, 32, 4, np.uint32) & 15).reshape(1000, 1088).astype(np.float32) - 8
    groups = rng.random((1000, 34), np.float32)
    tree = {
        "a.weight": codes,
        "a.weight_scale_inv": scale,
        "b.weight_packed": words.view(np.int32),
        "b.weight_scale": groups,
        "b.weight_shape": np.array([1000, 1088]),
    }
    found = applied(tree, rules.dequantize("**"))
    assert_same(np.asarray(found["a.weight"]), expected)
    assert_same(np.asarray(found["b.weight"]), nibbles * np.repeat(groups, 32, 1))
    assert_same(np.asarray(found["b.weight"][3:995, 5:1001]), (nibbles * np.repeat(groups, 32, 1))[3:995, 5:1001])


def test_a_part_reads_no_more_than_its_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = tr.open(FILES / "gptq_v2.safetensors")
    reads = counted(ckpt, monkeypatch)
    view = ckpt.apply([rules.dequantize("**", config=NOT_SAID["gptq_v2"])])
    assert not reads
    _ = view["bits4.weight"][8:16, 32:48]
    assert dict(reads) == {
        "bits4.qweight": ((4, 6), (8, 16)),
        "bits4.scales": ((0, 2), (8, 16)),  # the order of the inputs decides which groups
        "bits4.qzeros": ((0, 2), (1, 2)),
        "bits4.g_idx": ((32, 48),),
    }


def test_big_arrays_are_read_in_batches(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tr._core.views, "_BATCH_BYTES", 3000)
    codes = {
        f"l{n}": {"kernel": {"qvalue": np.full((40, 25), n, np.int8), "scale": np.ones((1, 25), np.float32)}}
        for n in range(8)
    }
    tr.save(tmp_path / "c", {**codes, "norm": np.ones(9000, np.float32)})
    ckpt = tr.open(tmp_path / "c")
    sizes: list[int] = []
    read = ckpt._source.read
    monkeypatch.setattr(ckpt._source, "read", lambda wanted, **more: sizes.append(len(wanted)) or read(wanted, **more))
    found = ckpt.restore(rules=[rules.dequantize("**")])
    assert sizes == [4, 4, 4, 5]
    assert_same(
        found,
        {
            **{f"l{n}": {"kernel": np.full((40, 25), n, np.float32)} for n in range(8)},
            "norm": np.ones(9000, np.float32),
        },
    )


def counted(ckpt: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Box]]:
    """Returns a list that gets the boxes that a checkpoint reads from now on."""
    reads: list[tuple[str, Box]] = []
    read = ckpt._source.read

    def counting(wanted: Any, **options: Any) -> Any:
        reads.extend((entry.path, box) for entry, box in wanted)
        return read(wanted, **options)

    monkeypatch.setattr(ckpt._source, "read", counting)
    return reads


def applied(arrays: dict[str, Any], rule: rules.Rule) -> tr.Checkpoint:
    """Returns the arrays of a checkpoint under a rule."""
    path = f"memory://dequantize-{next(_NUMBERS)}"
    tr.save(path, arrays)
    return tr.open(path).apply([rule])


_NUMBERS = itertools.count()


# What only the model's configuration says.


def test_configuration_next_to_the_weights(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    read = safetensors_read.quantization_of
    monkeypatch.setattr(
        safetensors_read, "quantization_of", lambda store, folder: asked.append(folder) or read(store, folder)
    )
    folder = tmp_path / "model"
    folder.mkdir()
    for name, files in {
        "gptq": {"config.json": {"quantization_config": {"quant_method": "gptq", "bits": 4}}},
        "gptq_v2": {"quantize_config.json": {"bits": 4, "checkpoint_format": "gptq_v2"}, "config.json": {}},
        "mlx4": {
            "config.json": {"quantization": {"bits": 8, "group_size": 16, "layers.0": {"bits": 4, "group_size": 32}}}
        },
    }.items():
        shutil.rmtree(folder)
        folder.mkdir()
        shutil.copy(stored(name), folder / "model.safetensors")
        for file, said in files.items():
            (folder / file).write_text(json.dumps(said))
        glob = "layers.0.**" if name == "mlx4" else "**"
        for path in (folder, folder / "model.safetensors"):
            found = tr.open(path).apply([rules.rename("^none", "", optional=True), rules.dequantize(glob)])
            first = next(path for path in weights(name) if path in found)
            assert_same(np.asarray(found[first]), weights(name)[first])
    assert len(asked) == 6, "each checkpoint reads its configuration once, however many weights it has"
    (folder / "config.json").write_text("{")
    with pytest.raises(CorruptError, match=r"config\.json: expected JSON, .*repair it, or move it out"):
        tr.open(folder).apply([rules.dequantize("**")])


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("gptq", "checkpoint_format'"),
        ("mlx4", "bits'"),
    ],
)
def test_what_nothing_says_is_asked_for(name: str, argument: str) -> None:
    with pytest.raises(MismatchError, match=rf"pass dequantize\(…, config=\{{'{argument}: …\}}\)"):
        tr.open(stored(name)).apply([rules.dequantize("**")])


def test_a_code_book_that_only_static_values_name(tmp_path: pathlib.Path) -> None:
    tree = tr.restore(FILES / "qwix")["nf4"]["kernel"]
    tr.save(tmp_path / "c", {"kernel": tree})  # a dict, which has no static values
    with pytest.raises(MismatchError, match=r"config=\{'qtype': …\}\): 'nf4' for a code book, or 'uint4'"):
        tr.open(tmp_path / "c").apply([rules.dequantize("**")])
    widened = rules.cast("**/qvalue", "uint8")  # as the error of a safetensors file, which has no uint4, proposes
    with pytest.raises(MismatchError, match=r"config=\{'qtype': …\}\): 'nf4' for a code book, or 'uint8'"):
        tr.open(tmp_path / "c").apply([widened, rules.dequantize("**")])
    for first in ([], [widened]):
        nf4 = rules.dequantize("**", config={"qtype": "nf4"})
        found = tr.open(tmp_path / "c").apply([*first, nf4])["kernel"]
        assert_same(np.asarray(found), weights("qwix")["nf4/kernel"])


def test_scale_multiplies_what_dequantize_does_not_know(tmp_path: pathlib.Path) -> None:
    tree = {"d": {"kernel": np.full((4, 3), 2, "float8_e4m3fn"), "kernel_scale": np.ones((1, 3), np.float32) * 3}}
    tr.save(tmp_path / "c", tree)
    with pytest.raises(MismatchError, match=r"d/kernel_scale as they are, and tr\.rules\.scale multiplies by a scale"):
        tr.open(tmp_path / "c").apply([rules.dequantize("**")])
    made = tr.restore(tmp_path / "c", rules=[rules.scale("(.*/kernel)", r"\1_scale", "float32")])
    assert made["d"]["kernel"].tolist() == [[6, 6, 6]] * 4


# Input that does not fit.

FP8 = {"l.weight": np.ones((256, 300), ml_dtypes.float8_e4m3fn), "l.weight_scale_inv": np.ones((2, 3), np.float32)}
GPTQ = {
    key.removeprefix("bits4_order."): value
    for key, value in load_file(FILES / "gptq.safetensors").items()
    if key.startswith("bits4_order.")
}


def test_damaged_and_incomplete_groups() -> None:
    order = np.asarray(GPTQ["g_idx"])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"scales": None}, "weight: expected scales, found nothing; the checkpoint is incomplete"),
        ({"qzeros": None}, "weight: expected qzeros, found nothing"),
        (
            {"scales": np.ones((2, 31), np.float16)},
            r"weight: expected dtypes and shapes of GPTQ, found qweight int32\[8,32\]",
        ),
        (
            {"scales": np.ones((3, 32), np.float16)},
            r"weight: expected dtypes and shapes of GPTQ, found .*scales float16\[3,32\]",
        ),
        (
            {"qweight": GPTQ["qweight"].astype(np.int64)},
            r"expected dtypes and shapes of GPTQ, found qweight int64\[8,32\]",
        ),
        ({"scales": GPTQ["scales"].astype(np.float64)}, "scales is float64, which float32 cannot hold exactly"),
        ({"qzeros": GPTQ["qzeros"][:, :3]}, "codes of 3 bits are not dequantized; expected codes of 2, 4 or 8 bits"),
        ({"g_idx": order[:40]}, r"qweight with 5 rows for 40 codes of 4 bits, found 8"),
        ({"g_idx": order.astype(np.float32)}, r"g_idx as 64 integers, found float32\[64\]"),
    ]
    for changed, message in cases:
        arrays = {key: value for key, value in {**GPTQ, **changed}.items() if value is not None}
        with pytest.raises(MismatchError, match=message):
            applied(arrays, rules.dequantize("**", config=NOT_SAID["gptq"]))


@pytest.mark.parametrize("wrong", [-1, 2, 2**31 - 1])
def test_groups_out_of_range(wrong: int) -> None:
    order = np.array(GPTQ["g_idx"])
    order[17] = wrong
    found = applied({**GPTQ, "g_idx": order}, rules.dequantize("**", config=NOT_SAID["gptq"]))["weight"]
    assert found[:, :17].shape == (32, 17)
    with pytest.raises(CorruptError, match=rf"g_idx: expected numbers of groups from 0 to 1, found {wrong}; "):
        found[:, 10:20]


def test_zeros_that_libraries_read_differently() -> None:
    zeros = np.array(GPTQ["qzeros"])
    zeros[1, 2] |= 0xF << 8
    found = applied({**GPTQ, "qzeros": zeros}, rules.dequantize("**", config=NOT_SAID["gptq"]))["weight"]
    with pytest.raises(CorruptError, match="qzeros: expected zeros from 0 to 14, stored minus one, found 15, which"):
        np.asarray(found)
    assert np.asarray(
        applied({**GPTQ, "qzeros": zeros}, rules.dequantize("**", config=NOT_SAID["gptq_v2"]))["weight"]
    ).size


def test_shapes_that_disagree() -> None:
    packed = {
        key: np.asarray(value)
        for key, value in tr.open(FILES / "compressed_tensors.safetensors").items()
        if key.startswith("int4_zero.")
    }
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        (
            {"weight_shape": np.array([16, 70])},
            CorruptError,
            "weight_shape: expected a size for 8 words of 32 bits, found 70",
        ),
        (
            {"weight_shape": np.array([17, 64])},
            CorruptError,
            r"weight_shape: expected the shape of \[16\] rows of codes, found \[17, 64\]",
        ),
        ({"weight_shape": np.array([64])}, CorruptError, r"rows of codes, found \[64\]"),
        ({"weight_shape": np.array([16, -64])}, CorruptError, r"found \[16, -64\]"),
        ({"weight_scale": np.ones((16, 5), np.float16)}, MismatchError, "weight_block_size"),
        (
            {"weight_zero_point": np.ones((3, 4), np.int32)},
            MismatchError,
            r"zero_point of the shape \[2, 4\], found \[3, 4\]",
        ),
        ({"weight_shape": None}, MismatchError, "expected int4_zero.weight_shape, found nothing"),
    ]
    for changed, kind, message in cases:
        own = {f"int4_zero.{key}": value for key, value in changed.items()}
        arrays = {key: value for key, value in {**packed, **own}.items() if value is not None}
        with pytest.raises(kind, match=message):
            applied(arrays, rules.dequantize("**"))


def test_blocks_that_could_be_several() -> None:
    codes = np.ones((192, 64), ml_dtypes.float8_e4m3fn)
    scale = np.arange(4, dtype=np.float32).reshape(2, 2)
    with pytest.raises(MismatchError, match=r"config=\{'weight_block_size': …\}"):
        applied({"l.weight": codes, "l.weight_scale": scale}, rules.dequantize("**"))
    given = rules.dequantize("**", config={"weight_block_size": [128, 32]})
    found = np.asarray(applied({"l.weight": codes, "l.weight_scale": scale}, given)["l.weight"])
    assert_same(found, np.repeat(np.repeat(scale, [128, 64], 0), 32, 1))
    with pytest.raises(MismatchError, match="for each 100 of 192 along axis -2, found 3; pass the size of the blocks"):
        arrays = {"l.weight": codes, "l.weight_scale_inv": np.ones((3, 1), np.float32)}
        applied(arrays, rules.dequantize("**", config={"weight_block_size": [100, 64]}))


def test_layouts_without_known_arithmetic_are_refused() -> None:
    for arrays, message in (
        (
            {"d": {"kernel": np.ones((4, 4), np.int8), "kernel_scale": np.ones(4, np.float32)}},
            "d/kernel: Keras is not dequantized",
        ),
        (
            {
                "l.weight": np.ones((4, 8), np.uint8),
                "l.weight_scale": np.ones((4, 1), ml_dtypes.float8_e4m3fn),
                "l.weight_scale_2": np.ones(1, np.float32),
            },
            "NVFP4 of ModelOpt is not dequantized",
        ),
    ):
        with pytest.raises(MismatchError, match=message):
            applied(arrays, rules.dequantize("**"))


def test_what_could_mean_two_things_is_refused() -> None:
    embedding = {key: np.asarray(tr.open(stored("gptq"))[f"bits4.{key}"]) for key in GPTQ}
    for arrays, message in (
        ({f"embed_tokens.{key}": value for key, value in embedding.items()}, "GPTQ stores embeddings the other way"),
        ({**FP8, "l.weight": np.ones((256, 300), np.int8)}, "may be two float4 in a byte; expected float8"),
    ):
        with pytest.raises(MismatchError, match=message):
            applied(arrays, rules.dequantize("**", config=NOT_SAID["gptq"]))
    mlx = {key: np.asarray(value) for key, value in tr.open(stored("mlx4")).items() if key.startswith("layers.0.")}
    for config, message in (
        ({"bits": 4}, "pass .*config={'group_size': …}"),
        ({"bits": "4", "group_size": 32}, "config={'bits': '4'}; expected a positive integer"),
        ({"bits": 4, "group_size": 0}, "config={'group_size': 0}; expected a positive integer"),
        ({"bits": 3, "group_size": 32}, "codes of 3 bits are not dequantized"),
        ({"bits": 4, "group_size": 64}, r"expected a scale for each 64 codes of 4 bits, found float32\[8,4\]"),
    ):
        with pytest.raises(MismatchError, match=message):
            applied(mlx, rules.dequantize("**", config=config))
    narrow = {
        "l.weight_packed": np.full((2, 1), 0x21, np.int32),
        "l.weight_scale": np.ones((2, 1), np.float32),
        "l.weight_shape": np.array([2, 2]),
    }
    with pytest.raises(MismatchError, match="do not say its bits"):
        applied(narrow, rules.dequantize("**"))
    assert (
        np.asarray(applied(narrow, rules.dequantize("**", config={"bits": 4}))["l.weight"]).tolist() == [[-7, -6]] * 2
    )


def test_live_trees_and_parts(tmp_path: pathlib.Path) -> None:
    tree = tr.restore(FILES / "qwix")["tiles"]
    tr.save(tmp_path / "c", {"params": {"x": tree}}, rules=[rules.dequantize("**")])
    expected = {"x": {"kernel": weights("qwix")["tiles/kernel"]}}
    assert_same(tr.restore(tmp_path / "c"), {"params": expected})
    tr.save(tmp_path / "q", {"params": {"x": tree}})
    assert_same(tr.restore(tmp_path / "q", at="params", rules=[rules.dequantize("**")]), expected)
    view = (
        tr.open(FILES / "qwix")
        .select("nf4/**")
        .apply([rules.rename("^nf4/", "y/")])
        .apply([rules.drop("y/**/zero_point")])
    )
    assert_same(
        tr.open(FILES / "qwix").at("nf4").restore(rules=[rules.dequantize("**")])["kernel"],
        weights("qwix")["nf4/kernel"],
    )
    with pytest.raises(MismatchError, match="do not say its qtype"):  # The static values have other paths.
        view.apply([rules.dequantize("**")])


def test_activation_scales_go_with_the_weight(caplog: pytest.LogCaptureFixture) -> None:
    arrays = {**FP8, "l.input_scale": np.ones(1, np.float32), "l.k_scale": np.ones(1, np.float32)}
    with caplog.at_level(logging.INFO, "treering"):
        found = applied(arrays, rules.dequantize("**", "bfloat16"))
    assert sorted(found) == ["l.k_scale", "l.weight"] and found["l.weight"].dtype == "bfloat16"
    assert "left out with their weights: l.input_scale" in caplog.text


def test_arguments() -> None:
    for make, message in (
        (lambda: rules.dequantize("**", "int8"), "expected a floating-point dtype, found 'int8'"),
        (lambda: rules.dequantize("**", config="gptq"), "config: expected a dict, found 'gptq'"),  # type: ignore[arg-type]
        (lambda: applied(FP8, rules.dequantize("x.**")), "matches none of the 2 leaves"),
        (
            lambda: applied(GPTQ, rules.dequantize("**", config={"checkpoint_format": "marlin"})),
            "found checkpoint_format 'marlin'",
        ),
    ):
        with pytest.raises(MismatchError, match=message):
            make()
    assert sorted(applied(FP8, rules.dequantize("x.**", optional=True))) == sorted(FP8)


def test_two_sets_of_codes_of_one_weight() -> None:
    packed = {
        f"l.weight_{role}": np.asarray(tr.open(stored("compressed_tensors"))[f"int4.weight_{role}"])
        for role in ("packed", "scale", "shape")
    }
    both = {**FP8, **packed}
    with pytest.raises(MismatchError, match=r"l.weight and l.weight_packed would both be l.weight; drop one"):
        applied(both, rules.dequantize("**"))
    with pytest.raises(MismatchError, match=r"two leaves would be called 'l\.weight'"):
        applied({**packed, "l.weight": np.ones(3, np.float32)}, rules.dequantize("**"))


def test_some_weights_stay_quantized() -> None:
    both = {**FP8, **{key.replace("l.", "m."): value for key, value in FP8.items()}}
    assert sorted(applied(both, rules.dequantize("m.*"))) == ["l.weight", "l.weight_scale_inv", "m.weight"]
    assert sorted(applied(both, rules.dequantize("m.weight"))) == ["l.weight", "l.weight_scale_inv", "m.weight"]


# Four bits.


def test_packed_numbers_are_those_of_compressed_tensors() -> None:
    packed = np.asarray(tr.open(FILES / "compressed_tensors.safetensors")["int4.weight_packed"])
    found = np.asarray(applied({"w": packed}, rules.unpack("w", offset=8))["w"])
    shifts = np.arange(0, 32, 4, np.uint32)
    codes = (packed.view(np.uint32)[..., None] >> shifts & 15).reshape(16, 64).astype(np.int8) - 8
    assert_same(found, codes.astype(ml_dtypes.int4))


@pytest.mark.parametrize("into", ["int32", "uint8"])
@pytest.mark.parametrize("dtype", ["int4", "uint4"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_packing_and_unpacking(into: str, dtype: str, axis: int, tmp_path: pathlib.Path) -> None:
    count = 8 if into == "int32" else 2
    least = -8 if dtype == "int4" else 0
    values = np.random.default_rng(0).integers(least, least + 16, (16, 3 * 8, 40)).astype(dtype)
    tree = {"w": jnp.asarray(values), "norm": np.ones(3, np.float32)}
    with pytest.raises(UnsupportedError, match=r"w: u?int4; pack it by a rule, or cast it"):
        tr.save(tmp_path / "no.safetensors", tree)
    tr.save(tmp_path / "c.safetensors", tree, rules=[rules.pack("w", into, axis)])
    words = load_file(tmp_path / "c.safetensors")["w"]
    assert words.dtype == into and words.shape[axis] * count == values.shape[axis]
    nibbles = np.moveaxis(values.astype(np.int8), axis, 0).astype(np.uint32) & 15
    expected = sum(nibbles[n::count] << (4 * n) for n in range(count))
    assert_same(words, np.moveaxis(np.asarray(expected).astype(f"u{words.itemsize}").view(into), 0, axis))
    ckpt = tr.open(tmp_path / "c.safetensors").apply([rules.unpack("w", dtype, axis)])
    assert_same(np.asarray(ckpt["w"]).view(np.int8), values.astype(np.int8))  # with defined upper bits
    box = (slice(3, 14), slice(1, 22), slice(5, 39))
    assert_same(np.asarray(ckpt["w"][box]), values[box])
    assert_same(np.asarray(ckpt.apply([rules.pack("w", into, axis)])["w"][1:2]), words[1:2])
    if dtype == "int4":
        tr.save(tmp_path / "o", tree, rules=[rules.pack("w", into, axis, offset=8)])
        assert_same(np.asarray(tr.open(tmp_path / "o").apply([rules.unpack("w", dtype, axis, 8)])["w"]), values)


def test_a_part_unpacks_its_words_alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tr.save(tmp_path / "c", {"w": np.zeros((8, 16), np.int32)})
    ckpt = tr.open(tmp_path / "c")
    reads = counted(ckpt, monkeypatch)
    assert ckpt.apply([rules.unpack("w")])["w"][2:3, 17:31].shape == (1, 14)
    assert reads == [("w", ((2, 3), (2, 4)))]


def test_what_cannot_be_packed(tmp_path: pathlib.Path) -> None:
    tr.save(
        tmp_path / "c",
        {"w": np.zeros((4, 12), "int4"), "i": np.zeros((4, 4), np.int32), "f": np.zeros(4), "s": np.zeros((), "int4")},
    )
    ckpt = tr.open(tmp_path / "c")
    cases: list[tuple[Callable[[], rules.Rule], str]] = [
        (lambda: rules.pack("w"), "w has 12 along axis 1, expected a multiple of 8; pad it by a rule before"),
        (lambda: rules.pack("i"), r"i is int32\[4,4\]; expected int4 or uint4"),
        (lambda: rules.pack("w", "int16"), "expected int32 or uint32 or uint8, found 'int16'"),
        (lambda: rules.pack("w", axis=2), "w: axis 2 of 2"),
        (lambda: rules.pack("w", "uint8", offset=3), "expected the offset 0 or 8 for int4, found 3"),
        (lambda: rules.pack("s", "uint8"), "s: axis -1 of 0"),
        (lambda: rules.unpack("f"), r"f is float64\[4\]; expected int32 or uint32 or uint8"),
        (lambda: rules.unpack("i", "int8"), "expected int4 or uint4, found 'int8'"),
        (lambda: rules.unpack("i", "uint4", offset=8), "expected the offset 0 for uint4, found 8"),
    ]
    for make, message in cases:
        with pytest.raises(MismatchError, match=message):
            ckpt.apply([make()])
    padded = ckpt.apply([rules.pad("w", [(0, 0), (0, 4)]), rules.pack("w")])
    assert padded["w"].shape == (4, 2)
