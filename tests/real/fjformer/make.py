"""Writes the checkpoints in this folder, and `expected.json`, with FJFormer and EasyLM. The tests do not run it.

PYTHONPATH has FJFormer, unpacked, and a clone of github.com/young-geng/EasyLM; see `../README.md` for versions. The
checkpoints hold train states of Flax and Optax: entire ones and only parameters, with gather functions and without,
with original floats and as bfloat16, latest ones and milestones. The libraries' own readers give what is expected.
"""

import hashlib
import json
import os
import pathlib
import shutil
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import libraries
import numpy as np
import optax
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict

HERE = pathlib.Path(__file__).parent


def state(step: int) -> Any:
    """Returns a train state as both libraries have it: variables within `params`, with their own level of that name."""
    keys = jax.random.split(jax.random.PRNGKey(step), 3)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    kernel = jax.random.normal(keys[0], (16, 8))
    layer = {
        "kernel": jax.device_put(kernel, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))),
        "bias": jax.random.normal(keys[1], (8,), jnp.bfloat16),
        "scale": jnp.float32(0.5),
        "bits": jnp.arange(6, dtype=jnp.uint8),
        "mask": None,
    }
    params = {"params": {"transformer": {"h": {"0": layer}, "wte": {"embedding": jax.random.normal(keys[2], (9, 4))}}}}
    mask = {"params": {"transformer": {"h": {"0": {**dict.fromkeys(layer, True), "bits": False}}, "wte": True}}}
    optimizer = optax.chain(optax.clip(1.0), optax.masked(optax.adamw(0.1, mu_dtype=jnp.bfloat16), mask))
    return TrainState.create(apply_fn=None, params=params, tx=optimizer).replace(step=step)


def gather(made: Any) -> Any:
    """Returns functions that copy to the host, like those that both libraries make of partition rules."""
    return jax.tree.map(lambda leaf: jax.device_get, made, is_leaf=lambda leaf: leaf is None)


def described(found: Any) -> dict[str, Any]:
    about: dict[str, Any] = {}
    for key, value in flatten_dict(found).items():
        about["/".join(key)] = value if value is None or type(value) in (int, float) else array(value)
    return about


def array(value: Any) -> dict[str, Any]:
    found = np.asarray(value)
    hashed = hashlib.sha256(np.ascontiguousarray(found).tobytes()).hexdigest()
    return {"dtype": found.dtype.name, "shape": found.shape, "sha256": hashed}


def by_fjformer() -> None:
    folder = HERE / "fjformer"
    full, made = libraries.CheckpointManager(str(folder), float_dtype=""), state(7)
    full.save_all(made, gather(made), metadata={"a": 1}, milestone=True)
    full.save_all(state(12), gather(state(12)))
    libraries.CheckpointManager(str(folder), save_optimizer_state=False).save_all(made, gather(made), milestone=True)
    full.save_checkpoint(made, "without_gather_fns")


def by_easylm() -> None:
    folder, made = str(HERE / "easylm"), state(20)
    full = libraries.StreamingCheckpointer({"save_optimizer_state": True, "float_dtype": ""}, folder)
    full.save_all(made, gather(made), milestone=True)
    libraries.StreamingCheckpointer({}, folder).save_all(made, gather(made))  # only parameters, as bfloat16
    full.save_checkpoint(made, "without_gather_fns")


if __name__ == "__main__":
    readers = {
        "fjformer": libraries.CheckpointManager.load_checkpoint,
        "easylm": libraries.StreamingCheckpointer.load_checkpoint,
    }
    listed = {}
    for name, write in (("fjformer", by_fjformer), ("easylm", by_easylm)):
        shutil.rmtree(HERE / name, ignore_errors=True)
        (HERE / name).mkdir()
        write()
        for path in sorted((HERE / name).iterdir()):
            if path.suffix != ".pkl":
                listed[f"{name}/{path.name}"] = described(readers[name](str(path)))
    tensors = {"layer": {"kernel": state(7).params["params"]["transformer"]["h"]["0"]["kernel"], "step": 7}}
    safe = str(HERE / "fjformer" / "params.safetensors")
    libraries.CheckpointManager.save_checkpoint_safe(tensors, safe, metadata={"format": "flax"}, verbose=False)
    listed["fjformer/params.safetensors"] = described(libraries.CheckpointManager.load_checkpoint_safe(safe)[0])
    (HERE / "expected.json").write_text(json.dumps(listed, indent=0) + "\n")
