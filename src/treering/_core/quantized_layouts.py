"""The layouts of quantized weights: how each library names and shapes codes, scales and the rest.

A row only recognizes. Only names, dtypes and shapes are looked at, so that ordinary arrays named ``scale`` or
``weight`` are not mistaken.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from .entries import ArrayEntry

Members = Mapping[str, ArrayEntry]  # by role

_FLOAT8 = frozenset(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3"))
_RARE_FLOATS = frozenset(("float4_e2m1fn", "float8_e4m3b11fnuz", "float8_e3m4"))
SMALL_DTYPES = _FLOAT8 | _RARE_FLOATS | {"int8", "int4", "int2", "uint8", "uint4", "uint2"}
_SIGNED = _FLOAT8 | {"int8", "int4"}
CODES = SMALL_DTYPES | {"int32", "uint32"}
FLOATS = frozenset(("float32", "bfloat16", "float16", "float64"))
_SCALES = FLOATS | {"float8_e8m0fnu", "float8_e4m3fn"}


@dataclasses.dataclass(frozen=True)
class QuantizedLayout:
    """The names of the arrays of one quantized weight.

    name: what messages call it.
    source: the release and file where names and arithmetic were read.
    codes: the end of the codes' path; what precedes it is the stem that all members share. In it and in all other ends,
        ``/`` stands for a dot if the checkpoint's names have dots.
    needed, optional: the ends of the paths of further members, by role.
    weight: the end of the float weight's path; it replaces `codes`.
    certain: True if nothing else has such codes, so that codes alone are a group whose other members are missing.
    fits: returns True if dtypes and shapes of the members that exist are those of the layout.
    """

    name: str
    source: str
    codes: str
    needed: Mapping[str, str]
    optional: Mapping[str, str]
    weight: str
    certain: bool
    fits: Callable[[Members], bool]


def _tiles(codes: ArrayEntry, scale: ArrayEntry) -> bool:
    """Returns True if each size of the scale divides that of the codes."""
    return len(codes.shape) == len(scale.shape) and all(
        n == m or (m > 0 and n % m == 0) for n, m in zip(codes.shape, scale.shape, strict=True)
    )


def _blocks(codes: ArrayEntry, scale: ArrayEntry) -> bool:
    """Returns True for one scale, one for each row, or one for each block. The last block may be smaller."""
    shape, own = codes.shape, scale.shape
    same_rank = len(shape) == len(own) and all(m <= n for n, m in zip(shape, own, strict=True))
    return math.prod(own) == 1 or same_rank or (0 < len(own) < len(shape) and own == shape[: len(own)])


def _fits(
    codes: Iterable[str],
    scale: Iterable[str] = _SCALES,
    shapes: Callable[[ArrayEntry, ArrayEntry], bool] = _blocks,
    **others: Iterable[str],
) -> Callable[[Members], bool]:
    """Returns a test of dtypes by role, and of the scale's shape, for members that exist."""
    dtypes = {"codes": frozenset(codes), "scale": frozenset(scale), **{k: frozenset(v) for k, v in others.items()}}

    def fits(members: Members) -> bool:
        if any(entry.dtype not in dtypes[role] for role, entry in members.items() if role in dtypes):
            return False
        return "scale" not in members or shapes(members["codes"], members["scale"])

    return fits


def _qwix_fits(members: Members) -> bool:
    codes = members["codes"]
    return codes.dtype in SMALL_DTYPES and all(
        _tiles(codes, entry) and entry.dtype in (_SCALES if role == "scale" else {codes.dtype})
        for role, entry in members.items()
        if role in ("scale", "zero")
    )


def _gptq_fits(members: Members) -> bool:
    """Tests that codes are packed along the inputs: the columns of codes and scales are the same."""
    codes, scale, zero = members["codes"], members.get("scale"), members.get("zero")
    columns = codes.shape[-1:]
    return (
        codes.dtype == "int32"
        and len(codes.shape) == 2
        and (scale is None or (scale.dtype in FLOATS and scale.shape[-1:] == columns))
        and (zero is None or scale is None or _packs(zero.shape, scale.shape, -1))
    )


def _awq_fits(members: Members) -> bool:
    """Tests that codes are packed along the outputs: several columns of scales for each of the codes."""
    codes, scale, zero = members["codes"], members.get("scale"), members.get("zero")
    return (
        codes.dtype == "int32"
        and len(codes.shape) == 2
        and scale is not None
        and len(scale.shape) == 2
        and scale.dtype in FLOATS
        and scale.shape[1] in (8 * codes.shape[1], 4 * codes.shape[1])
        and (zero is None or zero.shape == (scale.shape[0], codes.shape[1]))
    )


def _awq_gemv_fits(members: Members) -> bool:
    codes, scale, zero = members["codes"], members["scale"], members["zero"]
    rows = {entry.shape[:1] for entry in (codes, scale, zero)}
    return codes.dtype == "int32" and len(codes.shape) == 2 and scale.dtype in FLOATS and len(rows) == 1


def _packs(packed: Sequence[int], plain: Sequence[int], axis: int) -> bool:
    """Returns True if along an axis some 2 to 8 bits of each number are packed into 32 bits, and no axis else differs.

    Both shapes have the same length.
    """
    if len(packed) != len(plain) or not packed:
        return False
    n, m = plain[axis], packed[axis]
    rest = [one for k, one in enumerate(packed) if k != axis % len(packed)]
    return rest == [one for k, one in enumerate(plain) if k != axis % len(plain)] and any(
        m == math.ceil(n * bits / 32) for bits in (1, 2, 3, 4, 5, 6, 7, 8)
    )


def _rows(codes: ArrayEntry, scale: ArrayEntry) -> bool:
    """Returns True if the scales differ from the codes in the last axis alone, or if there is one scale."""
    return codes.shape[:-1] == scale.shape[:-1] or math.prod(scale.shape) == 1


def _sixteenths(codes: ArrayEntry, scale: ArrayEntry) -> bool:
    """Returns True if there is one scale for each 8 bytes, which are 16 codes of 4 bits."""
    return _rows(codes, scale) and codes.shape[-1:] == tuple(8 * n for n in scale.shape[-1:])


def _thirty_seconds(codes: ArrayEntry, scale: ArrayEntry) -> bool:
    """Returns True if there is one scale for each 16 bytes, which are 32 codes of 4 bits."""
    return _rows(codes, scale) and codes.shape[-1:] == tuple(16 * n for n in scale.shape[-1:])


def _in_groups(codes: ArrayEntry, scale: ArrayEntry) -> bool:
    """Returns True if the scales are those of groups of 16 bytes each, along the codes' last axis."""
    return codes.shape == (*scale.shape, 16)


def _mlx_fits(members: Members) -> bool:
    """Tests that scales and biases are alike, and each covers an entire number of packed codes."""
    codes, scale, bias = members["codes"], members["scale"], members.get("bias")
    return (
        codes.dtype == "uint32"
        and len(codes.shape) >= 2
        and _tiles(codes, scale)
        and scale.dtype in (FLOATS if bias else {"uint8"})
        and (bias is None or (bias.shape, bias.dtype) == (scale.shape, scale.dtype))
    )


def _per_output(codes: ArrayEntry, scale: ArrayEntry) -> bool:
    """Returns True if there is a scale for each row of a matrix."""
    return len(codes.shape) == 2 and scale.shape == codes.shape[:1]


def _any_shape(codes: ArrayEntry, scale: ArrayEntry) -> bool:
    return True


_NF4 = {"state_nf4": "/quant_state/bitsandbytes__nf4", "state_fp4": "/quant_state/bitsandbytes__fp4"}
_NESTED = {"nested_scale": "/nested_absmax", "nested_table": "/nested_quant_map"}
_QWIX = {"zero": "zero_point"}
_AQT_MORE = {"scale_1": "scale/1", "bias": "bias/0", "bias_1": "bias/1", "mask": "sparsity_mask"}
_INPUT = {"activation": "input_scale"}

# The first row that fits wins, so that narrow rows precede wide ones.
LAYOUTS = (
    QuantizedLayout(
        "qwix",
        "qwix 0.1.8, qwix/_src/core/qarray.py",
        "array/qvalue",
        {"scale": "array/scale"},
        {"zero": "array/zero_point", "awq": "awq_scale", "smooth": "sq_scale"},
        "",
        True,
        _qwix_fits,
    ),
    QuantizedLayout(
        "qwix", "qwix 0.1.8, qwix/_src/core/qarray.py", "qvalue", {"scale": "scale"}, _QWIX, "", True, _qwix_fits
    ),
    QuantizedLayout(
        "AQT",
        "aqtp 0.9.0, aqt/jax/v2/aqt_tensor.py",
        "qvalue",
        {"scale": "scale/0"},
        {**_AQT_MORE, "scale_t": "scale_t/0"},
        "",
        False,
        _fits(SMALL_DTYPES, shapes=_tiles),
    ),
    QuantizedLayout(
        "AQT with transposed scales",
        "aqtp 0.9.0, aqt/jax/v2/aqt_tensor.py",
        "qvalue",
        {"scale": "scale_t/0"},
        {"bias": "bias/0", "mask": "sparsity_mask"},
        "",
        False,
        _fits(SMALL_DTYPES, shapes=_any_shape),
    ),
    *(
        QuantizedLayout(
            "AQT with transposed scales",
            "aqtp 0.9.0, aqt/jax/v2/flax/aqt_flax.py, its legacy Freezer",
            f"{side}/value",
            {"scale": f"{side}/scale"},
            {},
            side,
            False,
            _fits(SMALL_DTYPES, FLOATS, _any_shape),
        )
        for side in ("qrhs", "qlhs")
    ),
    QuantizedLayout(
        "GPTQ",
        "gptqmodel 7.7.0, gptqmodel/nn_modules/qlinear/__init__.py",
        "qweight",
        {"scale": "scales", "zero": "qzeros"},
        {"order": "g_idx"},
        "weight",
        True,
        _gptq_fits,
    ),
    QuantizedLayout(
        "AWQ",
        "autoawq 0.2.9, awq/modules/linear/gemm.py",
        "qweight",
        {"scale": "scales", "zero": "qzeros"},
        {},
        "weight",
        True,
        _awq_fits,
    ),
    QuantizedLayout(
        "AWQ for GEMV",
        "autoawq 0.2.9, awq/modules/linear/gemv.py",
        "qweight",
        {"scale": "scales", "zero": "qzeros"},
        {},
        "weight",
        False,
        _awq_gemv_fits,
    ),
    QuantizedLayout(
        "compressed-tensors",
        "compressed-tensors 0.20.1, compressed_tensors/compressors/pack_quantized/base.py",
        "weight_packed",
        {"scale": "weight_scale", "shape": "weight_shape"},
        {"zero": "weight_zero_point", "order": "weight_g_idx", **_INPUT},
        "weight",
        True,
        _fits({"int32"}, FLOATS, _rows, zero={"int32"}),
    ),
    QuantizedLayout(
        "NVFP4",
        "compressed-tensors 0.20.1, compressed_tensors/compressors/nvfp4/base.py",
        "weight_packed",
        {"scale": "weight_scale", "global_scale": "weight_global_scale"},
        {"activation": "input_global_scale"},
        "weight",
        True,
        _fits({"uint8"}, {"float8_e4m3fn"}, _sixteenths),
    ),
    QuantizedLayout(
        "MXFP4 of compressed-tensors",
        "compressed-tensors 0.20.1, compressed_tensors/compressors/mxfp4/base.py",
        "weight_packed",
        {"scale": "weight_scale"},
        {},
        "weight",
        False,
        _fits({"uint8"}, {"uint8", "float8_e8m0fnu"}, _thirty_seconds),
    ),
    QuantizedLayout(
        "MXFP6",
        "compressed-tensors 0.20.1, compressed_tensors/compressors/mxfp6/base.py",
        "weight_packed",
        {"scale": "weight_scale"},
        {},
        "weight",
        False,
        _fits({"uint8"}, {"uint8", "float8_e8m0fnu"}, _rows),
    ),
    QuantizedLayout(
        "NVFP4 of ModelOpt",
        "not read",
        "weight",
        {"scale": "weight_scale", "global_scale": "weight_scale_2"},
        _INPUT,
        "weight",
        False,
        _fits({"uint8"}, {"float8_e4m3fn"}, _sixteenths),
    ),
    QuantizedLayout(
        "MXFP8",
        "compressed-tensors 0.20.1, compressed_tensors/compressors/mxfp8/base.py",
        "weight",
        {"scale": "weight_scale"},
        _INPUT,
        "weight",
        False,
        _fits(_FLOAT8, {"uint8", "float8_e8m0fnu"}, _rows),
    ),
    QuantizedLayout(
        "fp8",
        "transformers 4.57.1, integrations/finegrained_fp8.py",
        "weight",
        {"scale": "weight_scale_inv"},
        _INPUT,
        "weight",
        False,
        _fits(_SIGNED),
    ),
    QuantizedLayout(
        "compressed-tensors",
        "compressed-tensors 0.20.1, compressed_tensors/compressors/naive_quantized/base.py",
        "weight",
        {"scale": "weight_scale"},
        {"zero": "weight_zero_point", "order": "weight_g_idx", **_INPUT},
        "weight",
        False,
        _fits(_SIGNED, FLOATS),
    ),
    QuantizedLayout(
        "quanto",
        "optimum-quanto 0.2.7, optimum/quanto/tensor/qbytes.py",
        "weight/_data",
        {"scale": "weight/_scale"},
        _INPUT,
        "weight",
        False,
        _fits(_SIGNED, FLOATS),
    ),
    QuantizedLayout(
        "MXFP4",
        "transformers 4.57.1, integrations/mxfp4.py",
        "_blocks",
        {"scale": "_scales"},
        {},
        "",
        False,
        _fits({"uint8"}, {"uint8", "float8_e8m0fnu"}, _in_groups),
    ),
    QuantizedLayout(
        "MLX",
        "mlx-lm 0.32.2, mlx.nn.QuantizedLinear",
        "weight",
        {"scale": "scales", "bias": "biases"},
        {},
        "weight",
        False,
        _mlx_fits,
    ),
    QuantizedLayout("MXFP4 of MLX", "not read", "weight", {"scale": "scales"}, {}, "weight", False, _mlx_fits),
    QuantizedLayout(
        "bitsandbytes",
        "bitsandbytes 0.48.2, bitsandbytes/functional.py",
        "",
        {"scale": "/absmax", "table": "/quant_map"},
        {**_NF4, **_NESTED},
        "",
        False,
        _fits({"uint8", "int8"}, {"float32", "uint8"}, _any_shape),
    ),
    QuantizedLayout(
        "LLM.int8",
        "bitsandbytes 0.48.2, bitsandbytes/nn/modules.py",
        "weight",
        {"scale": "SCB"},
        {"format": "weight_format"},
        "weight",
        False,
        _fits({"int8"}, FLOATS, _per_output),
    ),
    QuantizedLayout(
        "Keras",
        "keras 3.15.1, keras/src/layers/core/dense.py",
        "kernel",
        {"scale": "kernel_scale"},
        {"zero": "kernel_zero", "order": "g_idx"},
        "kernel",
        False,
        _fits({"int8", "uint8"}, FLOATS, _any_shape),
    ),
    QuantizedLayout(
        "Keras",
        "keras 3.15.1, keras/src/layers/core/dense.py",
        "quantized_kernel",
        {"scale": "kernel_scale"},
        {"zero": "kernel_zero", "order": "g_idx", "awq": "awq_scales"},
        "kernel",
        True,
        _fits({"int8", "uint8"}, FLOATS, _any_shape),
    ),
    QuantizedLayout(
        "Keras",
        "keras 3.15.1, keras/src/layers/core/embedding.py",
        "embeddings",
        {"scale": "embeddings_scale"},
        {"zero": "embeddings_zero", "order": "g_idx"},
        "embeddings",
        False,
        _fits({"int8", "uint8"}, FLOATS, _any_shape),
    ),
    QuantizedLayout(
        "fp8",
        "DeepSeek-V3, inference/convert.py and inference/model.py",
        "weight",
        {"scale": "scale"},
        _INPUT,
        "weight",
        False,
        _fits(_FLOAT8),
    ),
    # Several libraries write such names for other arrays than `weight`, too. Some multiply by the scale, others divide.
    QuantizedLayout("fp8", "transformers 4.57.1", "", {"scale": "_scale_inv"}, {}, "", False, _fits(_SIGNED)),
    *(
        QuantizedLayout("unknown", "not read", codes, {"scale": scale}, {}, codes, False, _fits(_SIGNED | _RARE_FLOATS))
        for codes, scale in (("", "_scale"), ("", "_scales"), ("", "/scale"), ("weight", "scale"), ("kernel", "scale"))
    ),
)
