"""Writes checkpoints of zarr 3 from which Orbax left out chunks of zeros, and what is in them.

Run `python make_zarr3.py` with the release in `../README.md`. 0.9.1 was the last one that left them out. The tests do
not run it. Orbax's own reader of that release, without a template, gives what is expected.
"""

import hashlib
import json
import os
import pathlib
import shutil

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RELEASE = ocp.__version__
HERE = pathlib.Path(__file__).parent
PLACE = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
TREE = {
    "zeros": jnp.zeros(4),
    "half": jax.device_put(jnp.array([0, 0, 1, 2], jnp.bfloat16), PLACE),
    "ones": jnp.ones((2, 2)),
    "rng": jax.random.PRNGKey(0),
    "host": np.zeros(3, np.int8),
    "off": False,
    "step": 0,
    "rate": 0.5,
}

if __name__ == "__main__":
    file = HERE / "expected.json"
    expected = json.loads(file.read_text())
    expected = {name: leaves for name, leaves in expected.items() if not name.startswith(RELEASE + "/")}
    for name, ocdbt in (("zarr3", False), ("zarr3-ocdbt", True)):
        path = HERE / RELEASE / name
        shutil.rmtree(path, ignore_errors=True)
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=True)).save(path, TREE)
        found = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(path)
        expected[f"{RELEASE}/{name}"] = {
            key: leaf
            if isinstance(leaf, bool | int | float)
            else {
                "dtype": leaf.dtype.name,
                "shape": leaf.shape,
                "sha256": hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest(),
            }
            for key, leaf in found.items()
        }
    file.write_text(json.dumps(expected, indent=0, sort_keys=True) + "\n")
