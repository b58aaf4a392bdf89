"""Quantized weights: codes are of no use without their scales, so that a restore never takes the two apart."""

import logging
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx, struct
from safetensors.numpy import load_file

import treering as tr
from helpers import REAL, assert_same
from treering import rules

FILES = REAL / "quantized"
_SHAPE = (8, 16)


@struct.dataclass
class QArray:
    """As in qwix, which is not installed here."""

    qvalue: jax.Array
    scale: jax.Array


@struct.dataclass
class WithAux:
    """As in qwix."""

    array: QArray


def _codes(dtype: Any = jnp.int8) -> jax.Array:
    return jnp.arange(128, dtype=jnp.float32).reshape(_SHAPE).astype(dtype)


def _floats(dtype: Any = jnp.float32) -> dict[str, Any]:
    layer = {"kernel": jnp.ones(_SHAPE, dtype), "bias": jnp.ones(16, dtype)}
    return {"params": {f"layer{n}": dict(layer) for n in range(3)}}


def _qwix(dtype: Any = jnp.int8) -> dict[str, Any]:
    kernel = WithAux(QArray(_codes(dtype), jnp.full((1, 16), 0.25)))
    return {"params": {name: {**layer, "kernel": kernel} for name, layer in _floats()["params"].items()}}


_FP8 = {
    "m.0.weight": _codes(jnp.float8_e4m3fn),
    "m.0.weight_scale_inv": np.full((1, 1), 0.25, np.float32),
    "m.norm.weight": jnp.ones(4, jnp.bfloat16),
}


def _fp8_floats(dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    shapes = {name: array.shape for name, array in _FP8.items() if not name.endswith("scale_inv")}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def _saved(tmp_path: pathlib.Path, tree: Any = _FP8, name: str = "m.safetensors") -> str:
    tr.save(path := f"{tmp_path}/{name}", tree)
    return path


_WITHOUT_SCALE: dict[str, Callable[[str], Any]] = {
    "extra": lambda path: tr.restore(path, like=_fp8_floats(), extra="ignore"),
    "extra glob": lambda path: tr.restore(path, like=_fp8_floats(), extra=["m.0.*_scale_inv"]),
    "float32": lambda path: tr.restore(path, like=_fp8_floats(jnp.float32), extra="ignore", dtype="template"),
    "dtype": lambda path: tr.restore(path, like=_fp8_floats(), extra="ignore", dtype="bfloat16"),
    "drop": lambda path: tr.restore(path, like=_fp8_floats(), rules=[rules.drop("*_inv")]),
    "rename": lambda path: tr.restore(
        path, like={"w": _fp8_floats()["m.0.weight"]}, rules=[rules.rename("m.0.weight", "w")], extra="ignore"
    ),
    "transpose": lambda path: tr.restore(
        path,
        like={"m.0.weight": jax.ShapeDtypeStruct(_SHAPE[::-1], jnp.bfloat16)},
        rules=[rules.transpose("m.0.weight", (1, 0))],
        extra="ignore",
    ),
    "select": lambda path: tr.open(path).select("*weight").restore(_fp8_floats()),
    "skip": lambda path: tr.restore(path, like={**_fp8_floats(), "m.0.weight_scale_inv": ...}),
    "one leaf": lambda path: tr.restore(path, at="m.0.weight", like=jnp.ones(_SHAPE)),
    "numpy": lambda path: tr.restore(path, like={"m.0.weight": np.ones(_SHAPE, np.float32)}, extra="ignore"),
}


@pytest.mark.parametrize("way", _WITHOUT_SCALE)
def test_codes_never_become_floats_while_their_scale_is_left_out(tmp_path: pathlib.Path, way: str):
    path = _saved(tmp_path)
    with pytest.raises(tr.errors.MismatchError, match=r"codes of a quantized weight \(fp8\).*scale.*dequantize"):
        _WITHOUT_SCALE[way](path)


def test_a_job_is_not_resumed_with_codes_as_its_weights(tmp_path: pathlib.Path):
    with tr.Checkpointer(tmp_path / "run") as run:
        run.save(1, _qwix(jnp.float8_e4m3fn)["params"]["layer0"]["kernel"].array)
        like = {"qvalue": jnp.ones(_SHAPE)}
        for restore in (
            lambda: run.restore(like, extra="ignore"),
            lambda: run.restore_or_init(lambda: like, extra="ignore"),
        ):
            with pytest.raises(tr.errors.MismatchError, match="codes of a quantized weight"):
                restore()


def test_codes_stay_codes_and_rules_may_change_them(tmp_path: pathlib.Path):
    path = _saved(tmp_path)
    want = np.asarray(_FP8["m.0.weight"])
    codes = {"m.0.weight": jax.ShapeDtypeStruct(_SHAPE, jnp.float8_e4m3fn)}
    assert (np.asarray(tr.restore(path, like=codes, extra="ignore")["m.0.weight"]) == want).all()
    assert (np.asarray(tr.open(path)["m.0.weight"]) == want).all()
    for dtype in ("float32", "bfloat16"):
        cast = tr.restore(path, like=_fp8_floats(jnp.float32), extra="ignore", rules=[rules.cast("m.0.weight", dtype)])
        assert (np.asarray(cast["m.0.weight"]) == want.astype(np.float32)).all()
    scale = rules.scale(r"(.*)\.weight", r"\1.weight_scale_inv", "float32", block=_SHAPE)
    scaled = tr.restore(path, like=_fp8_floats(jnp.float32), rules=[scale])
    assert (np.asarray(scaled["m.0.weight"]) == want.astype(np.float32) / 4).all()


def test_a_scale_that_is_left_out_by_name_is_a_warning(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture):
    got = tr.restore(_saved(tmp_path), like=_fp8_floats(jnp.float32), extra=["m.0.weight_scale_inv"])["m.0.weight"]
    assert (np.asarray(got) == np.asarray(_FP8["m.0.weight"], np.float32)).all()
    assert "become plain numbers: m.0.weight; tr.rules.dequantize multiplies them" in caplog.text


def test_codes_that_rules_cast_are_a_warning(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture):
    path = _saved(tmp_path)
    cast = rules.cast("**", "bfloat16")
    transpose = rules.transpose("m.0.weight", (1, 0))
    turned = {"m.0.weight": jax.ShapeDtypeStruct(_SHAPE[::-1], jnp.bfloat16)}
    for silent in (
        lambda: tr.restore(path, rules=[cast]),
        lambda: tr.restore(path, like=tr.restore(path, rules=[cast]), rules=[cast]),
        lambda: tr.restore(path, like=_fp8_floats(), rules=[rules.dequantize("**", "float32"), cast]),
        lambda: tr.convert(path, f"{tmp_path}/floats.safetensors", rules=[rules.dequantize("**"), cast]),
    ):
        silent()
    assert not caplog.records
    for warning in (
        lambda: tr.restore(path, like=_fp8_floats(), rules=[cast], extra=["m.0.weight_scale_inv"]),
        lambda: tr.restore(path, like=turned, rules=[cast, transpose], extra="ignore"),
        lambda: tr.convert(path, f"{tmp_path}/cast.safetensors", rules=[cast]),
    ):
        caplog.clear()
        warning()
        (record,) = caplog.records
        assert "codes of quantized weights become plain numbers: m.0.weight; tr.rules.dequantize" in record.message


def test_float8_without_a_scale_widens(tmp_path: pathlib.Path):
    path = _saved(tmp_path, {name: leaf for name, leaf in _FP8.items() if "scale" not in name})
    restored = tr.restore(path, like=_fp8_floats())["m.0.weight"]
    assert restored.dtype == jnp.bfloat16
    assert (np.asarray(restored) == np.asarray(_FP8["m.0.weight"]).astype(np.float32)).all()


def _dtypes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.dtype(leaf.dtype), tree)


def test_dtype_does_not_apply_to_quantized_weights(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture):
    path = _saved(tmp_path)
    kept = _dtypes(_FP8)
    wide = {**kept, "m.norm.weight": np.dtype("float32")}
    assert _dtypes(tr.restore(path, dtype="float32")) == wide
    assert _dtypes(tr.restore(path, like=_FP8, dtype="bfloat16")) == kept
    tr.convert(path, f"{tmp_path}/converted.safetensors", dtype="float32")
    tr.save(f"{tmp_path}/saved", _FP8, dtype="float32")
    for other in ("converted.safetensors", "saved"):
        assert _dtypes(tr.restore(f"{tmp_path}/{other}")) == wide
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 3
    assert all(
        "codes and scales of 1 quantized weight (fp8) keep their dtypes: m.0.weight" in record.message
        and "dequantize" in record.message
        for record in caplog.records
    )


def test_a_template_may_have_narrower_scales_if_asked_to(tmp_path: pathlib.Path):
    path = _saved(tmp_path, _qwix(), "q")
    like = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf, _qwix())
    restored = tr.restore(path, like=like, dtype="template")
    kernel = restored["params"]["layer0"]["kernel"].array
    assert (kernel.qvalue.dtype, kernel.scale.dtype) == (jnp.int8, jnp.bfloat16)
    with pytest.raises(tr.errors.MismatchError, match="dtype='template'"):
        tr.restore(path, like=like)


class _Layer(nnx.Module):
    def __init__(self, kernel: Any):
        self.kernel = nnx.Param(kernel)


def _in_boxes(kernel: Any) -> Any:
    return {"layer": {"kernel": jax.tree.map(lambda leaf: linen.Partitioned(leaf, (None, "x")), kernel)}}


_TREES = {
    "dicts": (_qwix, _floats),
    "layers in a list": (lambda: list(_qwix()["params"].values()), lambda: list(_floats()["params"].values())),
    "a stack": (
        lambda: {"kernel": QArray(jnp.stack([_codes()] * 3), jnp.ones((3, 1, 16)))},
        lambda: {"kernel": jnp.ones((3, *_SHAPE))},
    ),
    "nnx": (
        lambda: nnx.state(_Layer(QArray(_codes(), jnp.ones((1, 16))))),
        lambda: nnx.state(_Layer(jnp.ones(_SHAPE))),
    ),
    "linen boxes": (lambda: _in_boxes(QArray(_codes(), jnp.ones((1, 16)))), lambda: _in_boxes(jnp.ones(_SHAPE))),
    "dots": (lambda: _FP8, _fp8_floats),
}


@pytest.mark.parametrize("trees", _TREES)
@pytest.mark.parametrize("format", ["treering", "orbax", "flax"])
def test_an_error_says_first_that_the_checkpoint_is_quantized(tmp_path: pathlib.Path, trees: str, format: str):
    quantized, floats = _TREES[trees]
    tr.save(path := f"{tmp_path}/q", quantized(), format=format)
    with pytest.raises(tr.errors.MismatchError) as caught:
        tr.restore(path, like=floats())
    likely = str(caught.value).splitlines()[1]
    assert "the checkpoint is quantized (" in likely
    _check_advice(str(caught.value))
    restored = tr.restore(path, like=floats(), **_arguments(likely))
    assert _dtypes(restored) == _dtypes(floats())
    codes = np.asarray(jax.tree.leaves(quantized())[0 if trees == "dots" else -2], np.float32)
    scale = 0.25 if trees in ("dicts", "layers in a list", "dots") else 1
    weight = jax.tree.leaves(restored)[0 if trees == "dots" else -1]
    assert (np.asarray(weight, np.float32) == codes * scale).all()


def _arguments(likely: str) -> Any:
    """Returns the arguments that an error advises to pass."""
    advice = re.search(r"is not: (.*?)(?: \(|$)", likely)
    assert advice, likely
    return eval(f"dict({advice[1]})", {"tr": tr})


@pytest.mark.parametrize("name", ["aqt", "awq", "bitsandbytes", "compressed_tensors", "fp8", "mxfp4", "qwix"])
def test_the_advice_makes_the_weights_of_the_library(name: str):
    path = FILES / name if (FILES / name).is_dir() else FILES / f"{name}.safetensors"
    weights = load_file(FILES / f"{name}.weights.safetensors")
    like = {key: np.zeros_like(weight) for key, weight in weights.items()}
    with pytest.raises(tr.errors.MismatchError) as caught:
        tr.restore(path, like=like)
    _check_advice(str(caught.value))
    assert_same(tr.restore(path, like=like, **_arguments(str(caught.value).splitlines()[1])), weights)


def test_the_advice_also_renames(tmp_path: pathlib.Path):
    path = _saved(tmp_path, {"model": _qwix()["params"]}, "q")
    with pytest.raises(tr.errors.MismatchError) as caught:
        tr.restore(path, like=_floats())
    likely = str(caught.value).splitlines()[1]
    assert "quantized" in likely
    _check_advice("\n".join(line for line in str(caught.value).splitlines() if "kernel" in line))
    restored = tr.restore(path, like=_floats(), **_arguments(likely))
    want = np.asarray(_codes(), np.float32) * 0.25
    assert all((np.asarray(layer["kernel"]) == want).all() for layer in restored["params"].values())


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"m.0.kernel": np.zeros(_SHAPE, np.int8), "m.0.kernel_scale": np.ones(16, np.float32)}, "Keras"),
        (
            {
                "m.0.qweight": np.zeros((4, 64), np.int32),
                "m.0.scales": np.ones((1, 64), np.float16),
                "m.0.qzeros": np.zeros((1, 8), np.int32),
            },
            "checkpoint_format",
        ),
    ],
)
def test_an_error_says_why_floats_cannot_be_made(tmp_path: pathlib.Path, arrays: Any, words: str):
    path = _saved(tmp_path, arrays)
    like = {"m.0.kernel" if words == "Keras" else "m.0.weight": jnp.ones(_SHAPE)}
    with pytest.raises(tr.errors.MismatchError) as caught:
        tr.restore(path, like=like)
    likely = str(caught.value).splitlines()[1]
    assert "the checkpoint is quantized" in likely
    assert words in likely
    _check_advice(str(caught.value))


def _check_advice(text: str) -> None:
    """Checks that no line of an error takes a quantized weight apart."""
    assert not any(
        word in text for word in ("rules.drop", "missing=", "extra=", "grow=", "at=", "takes the template's")
    )


def test_an_error_says_first_that_the_template_is_quantized(tmp_path: pathlib.Path):
    path = _saved(tmp_path, _floats(), "floats")
    with pytest.raises(tr.errors.MismatchError) as caught:
        tr.restore(path, like=_qwix())
    likely = str(caught.value).splitlines()[1]
    assert "the template is quantized (qwix: 3 weights, such as 'params/layer0/kernel')" in likely
    assert "float model" in likely
    _check_advice(str(caught.value))


def test_an_error_names_both_layouts(tmp_path: pathlib.Path):
    path = _saved(tmp_path)
    like = {"m.0.weight_packed": np.zeros((16, 1), np.int32), "m.0.weight_shape": np.zeros(2, np.int64),
            "m.0.weight_scale": np.ones((16, 1), np.float32), "m.norm.weight": _FP8["m.norm.weight"]}  # fmt: skip
    with pytest.raises(tr.errors.MismatchError) as caught:
        tr.restore(path, like=like)
    likely = str(caught.value).splitlines()[1]
    assert "quantized (fp8: 1 weight" in likely
    assert "another layout (compressed-tensors: 1 weight" in likely
    _check_advice(str(caught.value))


def test_a_missing_scale_is_named(tmp_path: pathlib.Path):
    tree = {"kernel": {"qvalue": _codes()}}
    path = _saved(tmp_path, tree, "q")
    assert _dtypes(tr.restore(path, like=tree)) == _dtypes(tree)
    for like in ({"kernel": jnp.ones(_SHAPE)}, {"kernel": {"qvalue": _codes(), "scale": jnp.ones((1, 16))}}):
        with pytest.raises(
            tr.errors.MismatchError, match=r"lacks 'kernel/scale'|codes mean nothing without it"
        ) as caught:
            tr.restore(path, like=like)
        _check_advice(str(caught.value))


def test_names_may_differ_between_two_quantized_models(tmp_path: pathlib.Path):
    path = _saved(tmp_path, _qwix(), "q")
    like = {"model": _qwix()["params"]}
    with pytest.raises(tr.errors.MismatchError, match=r"likely: .*rename") as caught:
        tr.restore(path, like=like)
    assert "drop" not in str(caught.value)
    renamed = tr.restore(path, like=like, rules=[rules.rename("^params/", "model/")])
    assert _dtypes(renamed) == _dtypes(like)


def test_a_template_may_be_a_part_of_a_quantized_model(tmp_path: pathlib.Path):
    path = _saved(tmp_path, _qwix(), "q")
    floats = {"params": {"layer0": {"bias": jnp.ones(16)}}}
    for like in (floats, {"params": {"layer0": _qwix()["params"]["layer0"]}}):
        with pytest.raises(tr.errors.MismatchError, match=r"(?s)likely: .*extra='ignore' leaves out both") as caught:
            tr.restore(path, like=like)
        assert "missing=" not in str(caught.value)
        assert _dtypes(tr.restore(path, like=like, extra="ignore")) == _dtypes(like)
    # Without the scale, codes of the template would mean nothing.
    codes = {"params": {"layer0": {"bias": jnp.ones(16), "kernel": {"array": {"qvalue": _codes()}}}}}
    with pytest.raises(tr.errors.MismatchError) as caught:
        tr.restore(path, like=codes)
    (scale,) = [line for line in str(caught.value).splitlines() if "layer0/kernel/array/scale:" in line]
    assert "extra=" not in scale
    assert "likely: the template is a part" not in str(caught.value)
