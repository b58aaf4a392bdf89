"""A character-level transformer in Equinox, and the text that it learns."""

import pathlib
import sysconfig

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


def load_text(limit: int = 2_000_000) -> np.ndarray:
    """Returns Python's standard library as ASCII codes, uint8[n]."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))[:limit]
    codes = np.frombuffer(text, np.uint8)
    return codes[codes < 128]


def batch(text: np.ndarray, step: int, *, size: int, length: int) -> np.ndarray:
    """Returns the batch of a step, int32[size, length]. It depends on the step only."""
    starts = np.random.default_rng(step).integers(0, len(text) - length, size)
    return np.stack([text[start : start + length] for start in starts]).astype(np.int32)


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]

    def __init__(self, width: int, heads: int, key: jax.Array):
        one, two = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=one)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=two)
        self.norms = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Transformer(eqx.Module):
    embedding: eqx.nn.Embedding
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int, context: int, key: jax.Array):
        first, second, third, *rest = jax.random.split(key, 3 + depth)
        self.embedding = eqx.nn.Embedding(vocabulary, width, key=first)
        self.positions = 0.02 * jax.random.normal(second, (context, width))
        self.blocks = [Block(width, heads, k) for k in rest]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, vocabulary, key=third)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits, float32[length, vocabulary], of tokens, int32[length]."""
        x = jax.vmap(self.embedding)(tokens) + self.positions[: len(tokens)]
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))
