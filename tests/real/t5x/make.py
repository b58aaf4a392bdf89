"""Writes the checkpoints in this folder, and `expected.json`, with T5X. The tests do not run it.

PYTHONPATH is a clone of github.com/google-research/t5x; see `../README.md` for versions. There are three runs:
parameters and Adafactor's slots over eight devices; the same from NumPy, cast, and AdamW's with mutables, in small
chunks; and one with every leaf in the state dict, and an iterator over data. T5X's own reader,
`load_t5x_checkpoint`, gives what is expected.
"""

import hashlib
import json
import os
import pathlib
import shutil
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
from flax import core, traverse_util
from flax.linen import partitioning as flax_partitioning
from library import adafactor, checkpoints, optimizers, partitioning, train_state

HERE = pathlib.Path(__file__).parent
RULES = [("vocab", None), ("embed", None), ("mlp", "model")]


class Unpartitioned(partitioning.PjitPartitioner):
    """Partitions no leaf, so that T5X writes all of them into the state dict."""

    def get_mesh_axes(self, train_state: Any) -> Any:
        leaves = traverse_util.flatten_dict(train_state.state_dict(), keep_empty_nodes=True)
        empty = traverse_util.empty_node
        nothing = {path: leaf if leaf is empty else None for path, leaf in leaves.items()}
        return train_state.restore_state(traverse_util.unflatten_dict(nothing))


class Model(nn.Module):
    """A model of two layers, one of them in bfloat16."""

    mutable: bool = False

    def weight(self, name: str, axes: tuple[str, ...], *shape: int, dtype: Any = jnp.float32) -> Any:
        def init(key: Any) -> Any:
            return nn.initializers.normal(1)(key, shape, dtype) if name != "bias" else jnp.zeros(shape, dtype)

        return flax_partitioning.param_with_axes(name, init, axes=axes)

    @nn.compact
    def __call__(self, x: Any) -> Any:
        embedding = self.weight("embedding", ("vocab", "embed"), 16, 8)
        wi = self.weight("wi", ("embed", "mlp"), 8, 24)
        wo = self.weight("wo", ("mlp", "embed"), 24, 8, dtype=jnp.bfloat16)
        bias = self.weight("bias", ("mlp",), 24)
        if self.mutable:
            half = jnp.full((8,), 0.5, jnp.bfloat16)
            flax_partitioning.variable_with_axes("batch_stats", "mean", lambda: half, axes=("embed",))
        return (embedding[x] @ wi + bias) @ wo


def state(optimizer: Any, **options: bool) -> Any:
    variables = core.freeze(Model(**options).init(jax.random.PRNGKey(0), jnp.arange(3)))
    made = train_state.FlaxOptimTrainState.create(optimizer, variables)
    gradients = jax.tree.map(lambda leaf: jnp.ones_like(leaf) * leaf.any(), made.params)  # the bias stays zeros
    return made.apply_gradient(gradients, 0.5, made.flax_mutables)


def spread(made: Any, partitioner: Any) -> Any:
    """Spreads the leaves that have axes over the devices of these axes."""
    axes = traverse_util.flatten_dict(partitioner.get_mesh_axes(made).state_dict(), keep_empty_nodes=True)
    leaves = traverse_util.flatten_dict(made.state_dict(), keep_empty_nodes=True)
    for path, leaf in leaves.items():
        if isinstance(leaf, jax.Array) and axes[path] is not None:
            leaves[path] = jax.device_put(leaf, jax.sharding.NamedSharding(partitioner.mesh, axes[path]))
    return made.restore_state(traverse_util.unflatten_dict(leaves))


def save(name: str, made: Any, partitioner: Any, step: int, dtype: Any, data: Any = None) -> None:
    made = made.replace_step(jnp.array(step, jnp.int32))
    checkpoints.Checkpointer(made, partitioner, str(HERE / name), data, save_dtype=dtype).save(made)


def described(path: str) -> dict[str, Any]:
    found = traverse_util.flatten_dict(checkpoints.load_t5x_checkpoint(path), sep="/", keep_empty_nodes=True)
    about: dict[str, Any] = {}
    for key, value in found.items():
        if value is traverse_util.empty_node or value is None:
            about[key] = None if value is None else {}
            continue
        array = np.asarray(value)
        hashed = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        about[key] = {"dtype": array.dtype.name, "shape": array.shape, "sha256": hashed}
    return about


if __name__ == "__main__":
    rules = adafactor.standard_logical_factor_rules()
    partitioner = partitioning.PjitPartitioner(num_partitions=1, logical_axis_rules=RULES)
    for name in ("eight", "one", "within"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    many = state(adafactor.Adafactor(0.1, logical_factor_rules=rules, beta1=0.5, min_dim_size_to_factor=4))
    save("eight", spread(many, partitioner), partitioner, 1000, None)
    checkpoints._DESIRED_CHUNK_SIZE_BYTES = 256  # instead of 64 MiB
    numpy = jax.tree.map(np.asarray, many)
    save("one", numpy, partitioner, 20, np.float32)
    adam = state(optimizers.adamw(0.1), mutable=True)
    save("one", adam, partitioner, 0, None)
    save("within", adam, Unpartitioned(num_partitions=1), 3, jnp.bfloat16, iter(tf.data.Dataset.range(5)))
    listed = {str(path.relative_to(HERE)): described(str(path)) for path in sorted(HERE.glob("*/checkpoint_*"))}
    (HERE / "expected.json").write_text(json.dumps(listed, indent=0) + "\n")
