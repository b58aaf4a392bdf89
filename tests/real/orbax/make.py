"""Writes checkpoints with aggregated leaves, and what is in them, with old releases of Flax and Orbax.

Run `python make.py` with one of the releases in `../README.md`. 0.2.3 did not write `_METADATA` yet; 0.5.20 was the
last whose Flax aggregates by default. The tests do not run it. Orbax's own reader of that release, without a
template, gives what is expected.
"""

import hashlib
import importlib.metadata
import json
import os
import pathlib
import shutil
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax.training import checkpoints, orbax_utils, train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RELEASE = importlib.metadata.version("orbax-checkpoint")
HERE = pathlib.Path(__file__).parent
FOLDER = HERE / RELEASE


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2)(nn.relu(nn.Dense(3)(x)))


def state() -> train_state.TrainState:
    model = Model()
    params = model.init(jax.random.PRNGKey(0), jnp.ones((1, 2)))["params"]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    made = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
    return made.apply_gradients(grads=jax.tree_util.tree_map(jnp.ones_like, params))


def tree() -> dict[str, Any]:
    """Returns a tree with all kinds of leaves."""
    place = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    kinds = {"f16": np.ones(2, np.float16), "bool": np.array([True, False]), "u8": np.arange(3, dtype=np.uint8)}
    return {
        "spread": jax.device_put(jnp.arange(6.0).reshape(2, 3), place),
        "spread more": {"a": jax.device_put(jnp.arange(4), place)},
        "host": {"zero": np.zeros(()), "empty": np.zeros((0, 2)), **kinds},
        "jax": jnp.ones(2, jnp.bfloat16),
        "numbers": {"int": 3, "float": 1.5, "on": True, "big": 2**40},
        "list": [1, jnp.ones(2), {"x": np.arange(2)}],
        "tuple": (np.arange(3.0), None),
        "none": None,
        "nothing": {"dict": {}, "list": []},
    }


def some(made: Any) -> Any:
    """Returns the options of Flax since 0.7: only arrays that are spread over devices get their own files."""

    def asked(leaf: Any) -> ocp.SaveArgs:
        return ocp.SaveArgs(aggregate=not isinstance(leaf, jax.Array) or leaf.is_fully_replicated)

    return jax.tree_util.tree_map(asked, made)


def described(found: Any) -> dict[str, Any]:
    """Returns the leaves by path: a description of each array, and any other leaf itself."""
    about: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(found, is_leaf=lambda leaf: leaf is None)[0]:
        path = "/".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in keys)
        if leaf is None or isinstance(leaf, bool | int | float | str):
            about[path] = leaf
            continue
        array = np.asarray(leaf)
        hashed = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        about[path] = {"dtype": array.dtype.name, "shape": array.shape, "sha256": hashed}
    return about


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    file = HERE / "expected.json"
    expected = json.loads(file.read_text()) if file.exists() else {}
    expected = {name: leaves for name, leaves in expected.items() if not name.startswith(RELEASE + "/")}
    asked, trained = orbax_utils.save_args_from_target, state()
    flax.config.update("flax_use_orbax_checkpointing", True)
    checkpoints.save_checkpoint(str(FOLDER / "flax"), trained, step=7)
    alone = ocp.PyTreeCheckpointer()
    alone.save(FOLDER / "tree", tree(), save_args=some(tree()))
    with_items = {"state": alone, "config": ocp.Checkpointer(ocp.JsonCheckpointHandler())}
    items = {"state": trained, "config": {"rate": 0.5}}
    for name, handlers, saved, options in [
        ("manager", alone, tree(), {"save_args": asked(tree())}),
        ("items", with_items, items, {"state": {"save_args": asked(trained)}}),
    ]:
        run = ocp.CheckpointManager(FOLDER / name, handlers)
        run.save(3, saved, save_kwargs=options)
    for name in ("flax/checkpoint_7", "tree", "manager/3/default", "items/3/state"):
        expected[f"{RELEASE}/{name}"] = described(alone.restore(FOLDER / name))
    file.write_text(json.dumps(expected, indent=0, sort_keys=True) + "\n")
