"""Writes one of the checkpoints in this folder, and what is in it, with Levanter. The tests do not run it.

Run `python make.py NAME` with the Levanter of that name in PYTHONPATH; see `../README.md` for versions. It saves an
Equinox model with Haliax's named arrays, its Optax state, and numbers; some arrays are spread over eight devices.
Levanter's own reader gives what is expected.
"""

import hashlib
import json
import os
import pathlib
import shutil
import sys
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import library
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from levanter.utils import jax_utils

HERE = pathlib.Path(__file__).parent
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
IN, OUT, EMPTY = hax.Axis("in", 8), hax.Axis("out", 6), hax.Axis("empty", 0)
AXES = {"in": "data"}


class Layer(eqx.Module):
    weight: hax.NamedArray
    half: hax.NamedArray
    bias: Any
    name: str = eqx.field(static=True, default="layer")


class Model(eqx.Module):
    embedding: hax.NamedArray
    layers: list[Layer]
    scale: jax.Array
    nothing: Any = None


def model(seed: int) -> Model:
    keys = jax.random.split(jax.random.PRNGKey(seed), 5)
    place = NamedSharding(MESH, PartitionSpec("data"))

    def layer(key: Any) -> Layer:
        weight = hax.named(jax.device_put(jax.random.normal(key, (8, 6)), place), (IN, OUT))
        return Layer(weight, hax.named(jax.random.normal(key, (6,), jnp.bfloat16), OUT), jnp.zeros(6))

    embedding = hax.named(jax.random.normal(keys[0], (6, 8)), (OUT, IN))
    return Model(embedding, [layer(keys[1]), layer(keys[2])], jnp.float32(0.5))


def state(seed: int) -> tuple[Model, dict[str, Any]]:
    made = model(seed)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    arrays = eqx.filter(made, eqx.is_array)
    _, opt_state = optimizer.update(jax.tree_util.tree_map(jnp.ones_like, arrays), optimizer.init(arrays), arrays)
    more = {"ints": jnp.arange(-3, 3, dtype=jnp.int8), "rate": 0.25, "count": 3, "on": True, "empty": jnp.zeros((0, 3))}
    return made, {"opt_state": opt_state, "training_key": jax.random.PRNGKey(1), "more": more}


def save(path: str, step: int) -> None:
    made, rest = state(step)
    if sys.argv[1] == "1.1":
        library.checkpoint.save_checkpoint(made, rest, step, path)
    else:
        library.checkpoint.save_checkpoint({"model": made, **rest}, step, path, is_temporary=False)


def read(path: str, step: int) -> dict[str, Any]:
    """Returns the leaves by Levanter's paths, which Levanter reads into zeros of their kind."""
    made, rest = state(step)
    parts = {"model": made, "training_state": rest} if sys.argv[1] == "1.1" else {"": {"model": made, **rest}}
    found: dict[str, Any] = {}
    for name, part in parts.items():
        part = eqx.filter(part, lambda leaf: eqx.is_array(leaf) or isinstance(leaf, int | float | bool))
        blank = jax.tree_util.tree_map(lambda leaf: leaf * 0, part)
        load = library.tensorstore_serialization.tree_deserialize_leaves_tensorstore
        back = load(os.path.join(path, name), blank, AXES, MESH)
        names = jax_utils.leaf_key_paths(part, name, is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray))
        places = jax.tree_util.tree_leaves(names)
        arrays = jax.tree_util.tree_leaves(back)
        found |= {place.replace(".", "/"): array for place, array in zip(places, arrays, strict=True)}
    return found


def described(found: dict[str, Any]) -> dict[str, Any]:
    about = {}
    for path, value in found.items():
        array = np.asarray(value)
        hashed = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        about[path] = {"dtype": array.dtype.name, "shape": array.shape, "sha256": hashed}
    return about


if __name__ == "__main__":
    folder = HERE / sys.argv[1]
    shutil.rmtree(folder, ignore_errors=True)
    expected = json.loads((HERE / "expected.json").read_text()) if (HERE / "expected.json").exists() else {}
    for step in (20, 100) if folder.name == "0.2.20" else (20,):
        save(str(folder / f"step-{step}"), step)
        expected[f"{folder.name}/step-{step}"] = described(read(str(folder / f"step-{step}"), step))
    (HERE / "expected.json").write_text(json.dumps(expected, indent=0, sort_keys=True) + "\n")
