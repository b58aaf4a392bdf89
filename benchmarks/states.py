"""The states that are saved and restored."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

STATES = ("large", "gpt2", "small")
_MESHES = {  # sizes of a mesh, and how arrays are cut
    "sharded": ((8,), ("x",)),
    "4 × 2": ((4, 2), ("x", "y")),
    "4 devices": ((4,), ("x",)),
}


def template(name: str) -> Any:
    """The shapes, dtypes and shardings of a state."""
    if is_spread(name):
        sizes, spec = _MESHES[name]
        devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
        return _sharded(Mesh(devices, ("x", "y")[: len(sizes)]), *spec)
    shapes = {"large": _large, "gpt2": _gpt2_with_adam, "small": _small}[name]()
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, np.float32, sharding=where),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def make(name: str) -> Any:
    """A state of JAX arrays with random contents, which compress as badly as trained weights do.

    Of one that is spread over devices each process makes its own part.
    """
    if is_spread(name):
        return _make_sharded(template(name))
    random = np.random.default_rng(0)
    arrays = jax.tree.map(lambda leaf: random.standard_normal(leaf.shape, leaf.dtype), template(name))
    return jax.block_until_ready(jax.device_put(arrays))


def is_spread(name: str) -> bool:
    """Returns True if the state is 1 GiB in 16 leaves that are spread over a mesh."""
    return name in _MESHES


def is_small(state: Any) -> bool:
    """Returns True if all leaves are small."""
    return all(leaf.size < 4096 for leaf in jax.tree.leaves(state))


def _sharded(mesh: Mesh, *spec: Any) -> Any:
    where = NamedSharding(mesh, PartitionSpec(*spec))
    return {f"layer_{n:02d}": jax.ShapeDtypeStruct((8192, 2048), np.float32, sharding=where) for n in range(16)}


def _make_sharded(template: Any) -> Any:
    def array(n: int, leaf: Any) -> jax.Array:
        shape = leaf.sharding.shard_shape(leaf.shape)

        def shard(index: Any) -> np.ndarray:
            return np.random.default_rng([n, index[0].start or 0]).standard_normal(shape, leaf.dtype)

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)

    return jax.block_until_ready({name: array(n, leaf) for n, (name, leaf) in enumerate(template.items())})


def abstract(state: Any) -> Any:
    """Returns the template of a state or of another template, as Orbax needs it."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def nbytes(state: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def views(state: Any) -> list[np.ndarray]:
    """Returns the memory of the addressable shards as bytes, in the order of `jax.tree.leaves`."""
    shards = (shard for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards)
    return [np.asarray(shard.data).reshape(-1).view(np.uint8) for shard in shards]


def check(state: Any, restored: Any, who: str, like: Any = None) -> None:
    """Raises `AssertionError` unless the restored leaves are those of the state, bit for bit, and lie as in `like`."""
    for wanted, found in zip(jax.tree.leaves(like), jax.tree.leaves(restored), strict=True) if like else ():
        if hasattr(found, "sharding") and wanted.sharding != found.sharding:
            raise AssertionError(f"{who}: came back as {found.sharding}")
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True)
    for n, (expected, found) in enumerate(pairs):
        a, b = _here(expected), _here(found)
        if a.shape != b.shape or a.dtype != b.dtype or not np.array_equal(a.view(np.uint8), b.view(np.uint8)):
            raise AssertionError(f"{who}: leaf {n} came back changed")


def _here(leaf: Any) -> np.ndarray:
    """A leaf, or what this process has of it."""
    if isinstance(leaf, np.ndarray) or leaf.is_fully_addressable:
        return np.asarray(leaf)
    return np.stack([np.asarray(shard.data) for shard in leaf.addressable_shards])


def _large() -> Any:
    return {f"layer_{n:02d}": (1 << 24,) for n in range(16)}


def _small() -> Any:
    return {f"l{n:05d}": {"w": (512,)} for n in range(5_000)}


def _gpt2_with_adam() -> Any:
    return {"params": _gpt2(), "mu": _gpt2(), "nu": _gpt2()}


def _gpt2() -> Any:
    """GPT-2 with 124 million parameters."""
    width = 768

    def norm() -> Any:
        return {"g": (width,), "b": (width,)}

    def dense(into: int, out: int) -> Any:
        return {"w": (into, out), "b": (out,)}

    block = {
        "ln_1": norm(),
        "attn": {"c_attn": dense(width, 3 * width), "c_proj": dense(width, width)},
        "ln_2": norm(),
        "mlp": {"c_fc": dense(width, 4 * width), "c_proj": dense(4 * width, width)},
    }
    return {"wte": (50257, width), "wpe": (1024, width), "h": {f"{n:02d}": block for n in range(12)}, "ln_f": norm()}
