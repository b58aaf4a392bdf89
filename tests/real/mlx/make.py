"""Writes the files in this folder with MLX 0.32. The tests do not run it. Without metadata, the header has null."""

import pathlib

import mlx.core as mx

HERE = pathlib.Path(__file__).parent
ARRAYS = {
    "w": mx.arange(3),
    "empty": mx.zeros((0, 2)),
    "scalar": mx.array(1.5),
    "half": mx.full((2, 2), 0.25, mx.bfloat16),
    "complex": mx.full(2, 1 + 2j, mx.complex64),
    "flags": mx.array([True, False, True]),
}

mx.save_safetensors(str(HERE / "plain.safetensors"), ARRAYS)
mx.save_safetensors(str(HERE / "about.safetensors"), ARRAYS, {"format": "mlx"})
