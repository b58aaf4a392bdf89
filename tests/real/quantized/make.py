"""Writes the files in this folder: arrays as each library stores them, and the weight that the library makes of them.

The tests do not run it. `make.py GPTQMODEL AUTOAWQ` gets the folders of two unpacked source distributions, which do not
install without a GPU; their functions that are used here are plain PyTorch.
"""

import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TORCHDYNAMO_DISABLE"] = "1"
sys.path += sys.argv[1:3]

import jax
import jax.numpy as jnp
import numpy as np
import torch
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent
torch.manual_seed(0)


def write(name, arrays, weights):
    """Writes stored arrays and the library's weights, by the paths of the weights."""
    contiguous = {key: value.detach().contiguous() for key, value in arrays.items()}
    save_file(contiguous, HERE / f"{name}.safetensors")
    save_file(
        {key: value.detach().contiguous() for key, value in weights.items()}, HERE / f"{name}.weights.safetensors"
    )


def make_gptq():
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    for version in ("gptq_v2", "gptq"):
        arrays, weights = {}, {}
        for bits, act_order in ((4, True), (4, False), (8, False), (2, True)):
            linear = torch.nn.Linear(64, 32, bias=False)
            module = TorchLinear(
                bits=bits,
                group_size=32,
                sym=False,
                desc_act=act_order,
                in_features=64,
                out_features=32,
                bias=False,
                register_buffers=True,
            )
            top = 2**bits - 1
            scales = (linear.weight.reshape(32, 2, 32).abs().amax(-1) * 2 / top).to(torch.float16).float()
            zeros = torch.randint(1, top, (32, 2)).float()
            order = torch.arange(64, dtype=torch.int32) // 32
            order = order[torch.randperm(64)] if act_order else order
            module.pack_original(linear, scales, zeros, order)
            module.eval()
            weight = module.dequantize_weight().T
            if version == "gptq":
                convert_gptq_v2_to_v1_format_module(module, QuantizeConfig(bits=bits, group_size=32))
            name = f"bits{bits}{'_order' if act_order else ''}"
            for key in ("qweight", "qzeros", "scales", "g_idx"):
                arrays[f"{name}.{key}"] = getattr(module, key).clone()
            weights[f"{name}.weight"] = weight
        write(version, arrays, weights)


def make_awq():
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    linear = torch.nn.Linear(64, 32, bias=False).half()
    scales = (linear.weight.reshape(32, 2, 32).abs().amax(-1) * 2 / 15).half()
    zeros = torch.randint(0, 16, (32, 2)).half()
    own = WQLinear_GEMM.from_linear(linear, 4, 32, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    arrays = {f"layer.{key}": getattr(own, key) for key in ("qweight", "qzeros", "scales")}
    weight = dequantize_gemm(own.qweight, own.qzeros, own.scales, 4, 32)
    write("awq", arrays, {"layer.weight": weight.T})


def make_compressed_tensors():
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    kinds = {
        "int4": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16}, torch.bfloat16),
        "int4_zero": (
            "pack-quantized",
            {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
            torch.float16,
        ),
        "int8": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}, torch.float32),
        "int8_zero": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}, torch.bfloat16),
        "odd": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}, torch.float32),
        "plain_int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, torch.bfloat16),
        "float8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, torch.bfloat16),
        "float8_tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, torch.float32),
        "nvfp4": (
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            torch.bfloat16,
        ),
        "mxfp4": (
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
            torch.bfloat16,
        ),
        "mxfp8": (
            "mxfp8-quantized",
            {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
            torch.bfloat16,
        ),
    }
    arrays, weights = {}, {}
    for name, (format, args, dtype) in kinds.items():
        if name.startswith("mxfp4"):
            args["scale_dtype"] = torch.uint8
        own = QuantizationArgs(**args)
        columns = 61 if name == "odd" else 64
        weight = torch.randn(16, columns, dtype=dtype)
        size = own.group_size or columns
        top = {"nvfp4": 6, "mxfp4": 6}.get(name, 448 if args.get("type") == "float" else 2 ** (own.num_bits - 1) - 0.5)
        scale = weight.float().reshape(16, -1, size).abs().amax(-1) / top
        scale = scale.max().reshape(1) if args["strategy"] == "tensor" else scale
        state = {"weight": weight, "weight_scale": scale.to(dtype)}
        if own.symmetric is False:
            half = 2 ** (own.num_bits - 1)
            state["weight_zero_point"] = torch.randint(-half, half, scale.shape, dtype=torch.int8)
        if name == "nvfp4":
            state["weight_global_scale"] = torch.tensor([448.0 / scale.max()])
            state["weight_scale"] = (scale * state["weight_global_scale"]).to(torch.float8_e4m3fn).to(torch.float32)
        if name.startswith("mxfp"):
            state["weight_scale"] = 2 ** torch.ceil(torch.log2(scale))
        scheme = QuantizationScheme(targets=["Linear"], weights=own, format=format)
        compressor = BaseCompressor.get_value_from_registry(format)
        stored = compressor.compress(state, scheme)
        arrays |= {f"{name}.{key}": value for key, value in stored.items()}
        weights[f"{name}.weight"] = compressor.decompress(dict(stored), scheme)["weight"]
    write("compressed_tensors", arrays, weights)


def make_fp8():
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    arrays, weights = {}, {}
    for name, shape in {"wide": (4, 136), "tall": (136, 4), "experts": (2, 4, 136)}.items():
        scale = torch.rand(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)) / 100
        weight = torch.randn(shape).to(torch.float8_e4m3fn)
        arrays |= {f"{name}.weight": weight, f"{name}.weight_scale_inv": scale}
        weights[f"{name}.weight"] = _dequantize_fp8_weight(weight, scale, [128, 128], torch.float32)
    write("fp8", arrays, weights)


def make_mxfp4():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 150, (2, 6, 3), dtype=torch.uint8)
    scales[0, 0] = torch.tensor([0, 1, 254])
    weight = convert_moe_packed_tensors(blocks.clone(), scales.clone())
    write(
        "mxfp4",
        {"experts.gate_up_proj_blocks": blocks, "experts.gate_up_proj_scales": scales},
        {"experts.gate_up_proj": weight},
    )


def make_mlx():
    import mlx.core as mx

    for bits in (2, 4, 8):
        arrays, weights = {}, {}
        for n, dtype in enumerate((mx.float32, mx.bfloat16, mx.float16)):
            weight = mx.random.normal((8, 128)).astype(dtype)
            codes, scales, biases = mx.quantize(weight, group_size=32, bits=bits)
            arrays |= {f"layers.{n}.weight": codes, f"layers.{n}.scales": scales, f"layers.{n}.biases": biases}
            weights[f"layers.{n}.weight"] = mx.dequantize(codes, scales, biases, group_size=32, bits=bits)
        mx.save_safetensors(str(HERE / f"mlx{bits}.safetensors"), arrays)
        mx.save_safetensors(str(HERE / f"mlx{bits}.weights.safetensors"), weights)


def make_bitsandbytes():
    import bitsandbytes.functional as F

    arrays, weights = {}, {}
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            for n, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
                weight = torch.randn(5, 64, dtype=dtype)
                codes, state = F.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
                name = f"{kind}{'_nested' if nested else ''}.{n}.weight"
                arrays[name] = codes
                arrays |= {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
                weights[name] = F.dequantize_4bit(codes, state)
    weight = torch.randn(4, 32, dtype=torch.float16)
    stats = weight.float().abs().amax(1)
    codes = torch.round(weight.float() * 127 / stats[:, None]).to(torch.int8)
    arrays |= {"int8.weight": codes, "int8.SCB": stats, "int8.weight_format": torch.tensor(0, dtype=torch.uint8)}
    weights["int8.weight"] = F.int8_vectorwise_dequant(codes, stats)
    write("bitsandbytes", arrays, weights)


def make_jax():
    """Writes Treering's own checkpoints of the libraries' objects, which have no files of their own."""
    from aqt.jax.v2 import aqt_quantizer
    from qwix._src.core import qarray

    import treering as tr

    weight = jax.random.normal(jax.random.key(0), (16, 12))
    small = weight.astype(jnp.bfloat16)
    own = {
        "channels": qarray.quantize_api(weight, jnp.int8, channelwise_axes=(1,)),
        "tiles": qarray.quantize_api(small, jnp.int4, tiled_axes={0: 4}, channelwise_axes=(1,)),
        "zero": qarray.quantize_api(weight, jnp.int8, tiled_axes={0: 8}, calibration_method="minmax"),
        "zero_int4": qarray.quantize_api(small, jnp.int4, tiled_axes={1: 3}, calibration_method="minmax"),
        "nf4": qarray.quantize_api(weight, "nf4", tiled_axes={0: 4}),
        "nf4_bfloat16": qarray.quantize_api(small, "nf4", channelwise_axes=(0,)),
        "float8": qarray.quantize_api(weight, jnp.float8_e4m3fn, tiled_axes={0: 4, 1: 2}),
        "nvfp4": qarray.quantize_api(weight, "nvfp4", tiled_axes={0: 16}),
    }
    tr.save(HERE / "qwix", {name: {"kernel": {"array": array}} for name, array in own.items()}, overwrite=True)
    expected = {name: {"kernel": np.asarray(qarray.dequantize(array))} for name, array in own.items()}
    tr.save(HERE / "qwix.weights.safetensors", expected, overwrite=True)

    arrays, expected = {}, {}
    for name, bits, x in (("int8", 8, weight), ("int4", 4, small), ("float8", "e4m3", small)):
        array, _ = aqt_quantizer.quantizer_make(bits).quant(x, calibration_axes=[0])
        arrays[name] = {"kernel": array.replace(scale_t=None)}
        expected[name] = {"kernel": np.asarray(array.dequant())}
    both = arrays["int4"]["kernel"]
    both = both.replace(scale=[*both.scale, 1 + both.scale[0]], bias=[0.3 * both.scale[0], both.scale[0] ** 2])
    arrays["two"], expected["two"] = {"kernel": both}, {"kernel": np.asarray(both.dequant())}
    tr.save(HERE / "aqt", arrays, overwrite=True)
    tr.save(HERE / "aqt.weights.safetensors", expected, overwrite=True)


for name in sys.argv[3:] or ("gptq", "awq", "compressed_tensors", "fp8", "mxfp4", "mlx", "bitsandbytes", "jax"):
    globals()[f"make_{name}"]()
