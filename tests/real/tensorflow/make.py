"""Writes the checkpoints in this folder, and `expected.json`, with TensorFlow 2.21. The tests do not run it.

Uses three of TensorFlow's ways of saving: the operation itself, with tensors of every dtype and slices; a sharded
`Saver` over two devices with partitioned variables under T5's names, as Mesh TensorFlow used it; and a
`tf.train.Checkpoint`.
"""

import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

HERE = pathlib.Path(__file__).parent
DRAW = np.random.default_rng(0)
DTYPES = [
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz", "int4", "uint4"),
]
QUANTIZED = {"qint8": "int8", "quint8": "uint8", "qint16": "int16", "quint16": "uint16", "qint32": "int32"}


def sample(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    numbers = DRAW.standard_normal(shape) * 3
    if kind.kind == "c":
        numbers = numbers + 1j * DRAW.standard_normal(shape)
    return np.asarray(np.abs(numbers) if "uint" in dtype else numbers).astype(kind)


def described(array: Any) -> dict[str, Any]:
    array = np.asarray(array)
    if array.dtype == object:
        return {"shape": array.shape, "texts": [text.hex() for text in array.reshape(-1)]}
    return {"dtype": array.dtype.name, "shape": array.shape, "bytes": np.ascontiguousarray(array).tobytes().hex()}


def by_the_operation() -> dict[str, Any]:
    tensors: dict[str, Any] = {f"dtypes/{name}": sample(name, (2, 3)) for name in DTYPES}
    tensors |= {name: sample("int16", shape) for name, shape in (("scalar", ()), ("empty", (0, 4)), ("long", (1, 300)))}
    tensors["texts"] = np.array([[b"", b"abc"], ["ü\0".encode(), b"x" * 200]], object)
    tensors["text"] = np.array(b"alone", object)
    tensors["no texts"] = np.array([], object)
    full = sample("float32", (4, 6))
    bounds = [(0, 1), (1, 3)], [(0, 4), (4, 2)]  # start and length
    parts = {f"4 6 {a},{m}:{b},{n}": full[a : a + m, b : b + n] for a, m in bounds[0] for b, n in bounds[1]}
    saved = {name: tf.constant(value) for name, value in tensors.items()}
    for name, stored in QUANTIZED.items():
        tensors[name] = sample(stored, (3,))
        saved[name] = tf.bitcast(tf.constant(tensors[name]), getattr(tf, name))
    slices = [("sliced", spec, tf.constant(np.ascontiguousarray(part))) for spec, part in parts.items()]
    names = [*saved, *(name for name, _, _ in slices)]
    specs = [*("" for _ in saved), *(spec for _, spec, _ in slices)]
    tf.raw_ops.SaveV2(
        prefix=str(HERE / "operation"),
        tensor_names=names,
        shape_and_slices=specs,
        tensors=[*saved.values(), *(part for _, _, part in slices)],
    )
    return {**tensors, "sliced": full}


def by_a_sharded_saver() -> dict[str, Any]:
    v1 = tf.compat.v1
    values = {"shared/embedding": sample("float32", (16, 4)), "global_step": np.int64(1000)}
    for n in range(2):
        shapes = {"SelfAttention/q": (4, 8), "SelfAttention/o": (8, 4), "layer_norm/scale": (4,)}
        for name, shape in shapes.items():
            full = f"encoder/block_{n:03}/layer_000/{name}"
            values[full] = sample("float32", shape)
            slots = {"_slot_vr": shape[:1], "_slot_vc": shape[1:]} if len(shape) == 2 else {"_slot_v": shape}
            values |= {full + slot: sample("float32", kept) for slot, kept in slots.items()}
    (HERE / "t5").mkdir(exist_ok=True)
    with tf.Graph().as_default():
        for n, (name, value) in enumerate(values.items()):

            def rows(shape: Any, dtype: Any, partition_info: Any, value: np.ndarray = value) -> tf.Tensor:
                begin = partition_info.var_offset if partition_info else [0] * value.ndim
                return tf.constant(value[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))])

            parts = v1.fixed_size_partitioner(3) if name == "shared/embedding" else None
            with tf.device(f"/cpu:{n % 2}"), v1.variable_scope("", partitioner=parts):
                v1.get_variable(name, value.shape, value.dtype, initializer=rows, use_resource=False)
        with v1.Session(config=v1.ConfigProto(device_count={"CPU": 2})) as session:
            session.run(v1.global_variables_initializer())
            saver = v1.train.Saver(sharded=True, save_relative_paths=True)
            saver.save(session, str(HERE / "t5" / "model.ckpt"), 1000, write_meta_graph=False)
    return values


def by_objects() -> dict[str, Any]:
    weight, bias = sample("bfloat16", (3, 2)), sample("float32", (2,))
    root = tf.train.Checkpoint(w=tf.Variable(weight), layers=[tf.train.Checkpoint(b=tf.Variable(bias))])
    tf.train.CheckpointManager(root, str(HERE / "objects"), max_to_keep=1).save(checkpoint_number=7)
    suffix = ".ATTRIBUTES/VARIABLE_VALUE"
    return {f"w/{suffix}": weight, f"layers/0/b/{suffix}": bias, f"save_counter/{suffix}": root.save_counter.numpy()}


made = {"operation": by_the_operation(), "t5": by_a_sharded_saver(), "objects": by_objects()}
listed = {name: {key: described(value) for key, value in found.items()} for name, found in made.items()}
(HERE / "expected.json").write_text(json.dumps(listed, indent=0) + "\n")
