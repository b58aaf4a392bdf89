"""Writes the runs in this folder, and `expected.json`, with clu 0.0.12 and TensorFlow 2.21. The tests do not run it.

`state` is a run of a train state and an iterator over data, which TensorFlow saves. The run keeps two of its three
checkpoints. The checkpoints of `named` have a name with a number in it.
"""

import hashlib
import json
import pathlib
import shutil
from typing import Any

import flax
import jax.numpy as jnp
import numpy as np
import optax
import tensorflow as tf
from clu import checkpoint
from flax.traverse_util import flatten_dict

HERE = pathlib.Path(__file__).parent


@flax.struct.dataclass
class TrainState:
    step: int
    params: Any
    opt_state: Any


def state(step: int) -> TrainState:
    params = {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3) * step, "bias": jnp.full(3, step, jnp.bfloat16)}}
    return TrainState(step, params, optax.adam(1e-3).init(params))


def described(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return leaf
    digest = hashlib.sha256(leaf.tobytes()).hexdigest()
    return {"dtype": leaf.dtype.name, "shape": list(leaf.shape), "sha256": digest}


expected = {}
for folder, name, steps in (("state", "ckpt", (100, 200, 300)), ("named", "vit-2", (7,))):
    shutil.rmtree(HERE / folder, ignore_errors=True)
    data = iter(tf.data.Dataset.range(1000))
    run = checkpoint.Checkpoint(str(HERE / folder), {"data": data}, max_to_keep=2, checkpoint_name=name)
    for step in steps:
        next(data)
        path = run.save(state(step))
        leaves = flatten_dict(run.load_state(None), sep="/")
        expected[f"{folder}/{pathlib.Path(path).name}"] = {name: described(leaf) for name, leaf in leaves.items()}
expected = {name: leaves for name, leaves in expected.items() if (HERE / f"{name}.flax").exists()}
(HERE / "expected.json").write_text(json.dumps(expected, indent=0) + "\n")
