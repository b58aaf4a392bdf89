"""Writes the checkpoint in this folder with JAX's own serializer. The tests do not run it.

It needs flatbuffers. JAX leaves out chunks of zeros, here one of two.
"""

import os
import pathlib
import typing

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.array_serialization import pytree_serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Pair(typing.NamedTuple):
    x: jax.Array
    y: jax.Array


if __name__ == "__main__":
    jax.export.register_namedtuple_serialization(Pair, serialized_name="Pair")
    place = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    tree = {
        "half": jax.device_put(jnp.array([0, 0, 1, 2], jnp.bfloat16), place),
        "list": [jnp.arange(3), None, (jnp.float32(1.5),), [], {}],
        "a/b": jnp.ones((2, 2)),
        "pair": Pair(jnp.zeros(2), jnp.zeros((0, 2))),
    }
    pytree_serialization.save(tree, pathlib.Path(__file__).parent / "tree")
