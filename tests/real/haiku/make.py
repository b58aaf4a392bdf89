"""Writes the files in this folder with Haiku 0.0.17 and Flax 0.12.8. The tests do not run it.

Haiku's parameters are a dict of modules, each a dict of arrays. The modules' names contain slashes:
``mlp/~/linear_0`` has ``w``. Haiku has no format of its own; Flax writes ``params.msgpack``.
"""

import pathlib

import haiku as hk
import jax
import jax.numpy as jnp
from flax import serialization

HERE = pathlib.Path(__file__).parent


class Block(hk.Module):
    """A module with its own parameter and with submodules."""

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = hk.get_parameter("scale", x.shape[-1:], init=jnp.ones)
        return hk.nets.MLP([3, 2])(x * scale)


params = hk.transform(lambda x: Block()(hk.Linear(4)(x))).init(jax.random.key(0), jnp.ones((1, 2)))
print(jax.tree.map(jnp.shape, params))
(HERE / "params.msgpack").write_bytes(serialization.to_bytes(params))
