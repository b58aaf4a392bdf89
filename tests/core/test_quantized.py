import pytest

from treering._core.entries import ArrayEntry, lost_entry
from treering._core.quantized import find_groups

_F32, _F16, _BF16, _FP8 = "float32", "float16", "bfloat16", "float8_e4m3fn"

# The layout, the path of the float weight, the paths and roles, dtypes and shapes of members. The shapes are what the
# libraries that `LAYOUTS` names write for a matrix of 256 inputs and 512 outputs, or 512 experts.
_KNOWN = {
    "qwix": ("params/l/kernel", {"array/qvalue": ("int8", (256, 512)), "array/scale": (_F32, (1, 512))}),
    "qwix tiles": (
        "kernel",
        {"qvalue": ("uint4", (256, 512)), "scale": (_F32, (2, 512)), "zero_point": ("uint4", (2, 512))},
    ),
    "qwix layers": ("kernel", {"array/qvalue": (_FP8, (3, 256, 512)), "array/scale": (_BF16, (3, 1, 512))}),
    "qwix levels": ("l/kernel/value", {"array/qvalue": ("int8", (4, 4)), "array/scale": (_F32, (1, 4))}),
    "AQT": ("l/qrhs/frozen", {"qvalue": ("int8", (256, 512)), "scale/0": (_F32, (1, 512))}),
    "AQT with transposed scales": ("l/AqtDotGeneral_0/qrhs", {"value": ("int8", (32, 16)), "scale": (_F32, (1, 16))}),
    "GPTQ": (
        "m.0.q_proj.weight",
        {
            "-qweight": ("int32", (32, 512)),
            "-qzeros": ("int32", (2, 64)),
            "-scales": (_F16, (2, 512)),
            "-g_idx": ("int32", (256,)),
        },
    ),
    "AWQ": (
        "m.0.q_proj.weight",
        {"-qweight": ("int32", (256, 64)), "-qzeros": ("int32", (2, 64)), "-scales": (_F16, (2, 512))},
    ),
    "compressed-tensors": (
        "m.0.weight",
        {"-weight_packed": ("int32", (512, 32)), "-weight_scale": (_BF16, (512, 2)), "-weight_shape": ("int64", (2,))},
    ),
    "NVFP4": (
        "m.0.weight",
        {
            "-weight_packed": ("uint8", (512, 128)),
            "-weight_scale": (_FP8, (512, 16)),
            "-weight_global_scale": (_F32, (1,)),
        },
    ),
    "MXFP4 of compressed-tensors": (
        "m.0.weight",
        {"-weight_packed": ("uint8", (512, 128)), "-weight_scale": ("uint8", (512, 8))},
    ),
    "MXFP8": ("m.0.weight", {"-weight": (_FP8, (512, 256)), "-weight_scale": ("uint8", (512, 8))}),
    "fp8": ("m.0.weight", {"-weight": (_FP8, (512, 200)), "-weight_scale_inv": (_F32, (4, 2))}),
    "fp8 experts": ("m.experts.gate_up_proj", {"+": (_FP8, (8, 512, 256)), "+_scale_inv": (_F32, (8, 4, 2))}),
    "compressed-tensors int8": (
        "m.0.weight",
        {"-weight": ("int8", (512, 256)), "-weight_scale": (_BF16, (512, 1)), "-weight_zero_point": ("int8", (512, 1))},
    ),
    "compressed-tensors one scale": (
        "m.0.weight",
        {"-weight": (_FP8, (512, 256)), "-weight_scale": (_F32, ()), "-input_scale": (_F32, ())},
    ),
    "quanto": ("m.0.weight", {"-weight._data": ("int8", (512, 256)), "-weight._scale": (_F32, (512, 1))}),
    "MXFP4": ("m.experts.gate_up_proj", {"+_blocks": ("uint8", (8, 512, 8, 16)), "+_scales": ("uint8", (8, 512, 8))}),
    "MLX": ("m.0.weight", {"-weight": ("uint32", (512, 32)), "-scales": (_F16, (512, 4)), "-biases": (_F16, (512, 4))}),
    "bitsandbytes": (
        "m.0.weight",
        {
            "-weight": ("uint8", (65536, 1)),
            "-weight.absmax": (_F32, (2048,)),
            "-weight.quant_map": (_F32, (16,)),
            "-weight.quant_state.bitsandbytes__nf4": ("uint8", (72,)),
        },
    ),
    "LLM.int8": (
        "m.0.weight",
        {"-weight": ("int8", (512, 256)), "-SCB": (_F32, (512,)), "-weight_format": ("uint8", ())},
    ),
    "fp8 of DeepSeek's programs": ("m.0.weight", {"-weight": (_FP8, (512, 200)), "-scale": (_F32, (4, 2))}),
    "unknown float4": (
        "m.0.weight",
        {"-weight": ("float4_e2m1fn", (512, 256)), "-weight_scale": ("float8_e8m0fnu", (512, 8))},
    ),
    "unknown float8": ("m.0.weight", {"-weight": ("float8_e3m4", (512, 256)), "-weight_scale": (_F32, (1,))}),
    "unknown int8": ("m.0.weight", {"-weight": ("int8", (512, 256)), "-scale": (_F32, (512, 1))}),
    "unknown below": ("m.0.weight", {"+": (_FP8, (512, 256)), "+.scale": (_F32, ())}),
    "unknown scales": ("m.0.w", {"+": (_FP8, (512, 256)), "+_scales": (_F32, (512, 1))}),
    "Keras": ("dense/kernel", {"kernel": ("int8", (256, 512)), "kernel_scale": (_F32, (512,))}),
}


def _paths(weight: str, member: str) -> str:
    """`+` stands for the weight's path, `-` for its module; other names follow the weight or its container."""
    if member[0] == "+":
        return weight + member[1:]
    if member[0] == "-":
        return weight.removesuffix("weight") + member[1:]
    return f"{weight.rpartition('/')[0]}/{member}" if member.startswith("kernel") else f"{weight}/{member}"


@pytest.mark.parametrize("name", _KNOWN)
def test_a_quantized_weight_is_recognized(name: str):
    weight, members = _KNOWN[name]
    entries = {path: ArrayEntry(path, "numpy", *kind) for m, kind in members.items() if (path := _paths(weight, m))}
    others = {p: ArrayEntry(p, "numpy", _F32, (512,)) for p in ("norm/scale", "m.norm.weight", "dense/bias")}

    (group,) = find_groups({**others, **entries})
    assert (group.path, group.missing) == (weight, ())
    assert set(group.members.values()) == set(entries)
    assert next(iter(group.members)) == "codes"
    assert name.startswith(group.layout.name)

    # A weight that certainly is one is also found without its scale. Any other is an ordinary array then.
    scale = group.members["scale"]
    found = find_groups({path: entry for path, entry in entries.items() if path != scale})
    assert bool(found) == group.members["codes"].endswith(("qvalue", "qweight", "weight_packed"))
    assert all(group.missing for group in found)


@pytest.mark.parametrize(
    "arrays",
    [
        {"norm/scale": (_F32, (16,)), "norm/bias": (_F32, (16,))},
        {"w/weight": (_F32, (16, 8)), "w/weight_scale": (_F32, (16, 1))},  # weight normalization
        {"w/weight_v": (_F32, (16, 8)), "w/weight_g": (_F32, (16, 1))},
        {"kernel": (_F32, (16, 8)), "kernel_scale": ("float32", (1,))},  # the float8 training of Flax
        {"weight": ("uint8", (28, 28)), "scale": (_F32, (28,))},  # an image
        {"weight": ("uint8", (28, 28)), "weight_scale": (_F32, (28, 1))},
        {"image": ("uint8", (28, 28)), "image_scale": (_F32, ())},
        {"blocks/scales": (_F32, (4,)), "x_blocks": ("uint8", (4, 4)), "x_scales": ("uint8", (4, 2))},
        {"weight": ("uint32", (2,)), "scales": (_F32, (2,)), "biases": (_F32, (2,))},
        {"weight": ("float8_e4m3fn", (8, 8)), "norm/weight_scale": (_F32, (8, 1))},  # no scale of its own
        {"weight": ("float8_e4m3fn", (8, 8)), "weight_scale": (_F32, (9, 1))},
        {"step": ("int32", ()), "key": ("uint32", (2,)), "mask": ("bool", (4,)), "count": ("int8", ())},
    ],
)
def test_ordinary_arrays_are_not_quantized_weights(arrays: dict[str, tuple[str, tuple[int, ...]]]):
    assert find_groups({path: ArrayEntry(path, "jax", *kind) for path, kind in arrays.items()}) == []


def test_what_cannot_be_read_is_no_member():
    assert find_groups({"k/qvalue": lost_entry("k/qvalue", "damaged"), "k": ArrayEntry("k", "jax", "int8", (2,))}) == []
