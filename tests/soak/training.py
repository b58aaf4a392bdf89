"""Two small training jobs whose every step has the same bits on any number of devices and processes.

Each process computes the step on its first device; only what is saved and restored is spread over all devices. So a
job that was moved must agree with one that was never interrupted, and a difference is a fault of the checkpoint.
"""

import functools
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import xxhash
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH = 768  # of the frozen weights: 1.1 MiB, so a save shares their file with earlier steps


def batches(seed: int) -> grain.DatasetIterator:
    """Returns a shuffled pipeline with a random transformation; its state is a leaf of the saved tree."""
    rows = list(np.random.default_rng(seed).normal(size=(512, 16)).astype(np.float32))

    def noisy(row: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return row + rng.normal(size=row.shape).astype(np.float32)

    return iter(
        grain.MapDataset.source(rows).seed(seed).shuffle().random_map(noisy).repeat().batch(8).to_iter_dataset()
    )


class Net(nnx.Module):
    """A module with dropout and batch statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(16, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


class Modules:
    """Trains NNX objects, which each step changes in place."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def init(self) -> dict[str, Any]:
        model = Net(nnx.Rngs(self._seed))
        optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
        return {"model": model, "optimizer": optimizer, "data": batches(self._seed)}

    def adopt(self, tree: dict[str, Any]) -> dict[str, Any]:
        return tree

    def step(self, tree: dict[str, Any]) -> dict[str, Any]:
        _train(tree["model"], tree["optimizer"], next(tree["data"]))
        return tree

    def saved(self, tree: dict[str, Any]) -> dict[str, Any]:
        return tree

    def digest(self, tree: dict[str, Any]) -> str:
        return digest(nnx.state((tree["model"], tree["optimizer"])))


@nnx.jit
def _train(model: Net, optimizer: nnx.Optimizer, x: jax.Array) -> None:
    grads = nnx.grad(lambda net: jnp.mean((net(x) - x[:, :4]) ** 2))(model)
    optimizer.update(model, grads)


class Adapters:
    """Trains low-rank adapters on frozen weights. Arrays are spread over all devices of all processes when saved."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._mesh = Mesh(np.array(jax.devices()), ("x",))
        self._frozen: jax.Array | None = None

    def init(self) -> dict[str, Any]:
        rng = np.random.default_rng(self._seed)
        frozen = rng.normal(size=(WIDTH, WIDTH)).astype(jnp.bfloat16)
        adapters = {
            "a": rng.normal(size=(WIDTH, 8)).astype(np.float32) / 30,
            "b": np.zeros((8, WIDTH), np.float32),
            "in": rng.normal(size=(16, WIDTH)).astype(np.float32) / 4,
        }
        opt = jax.tree.map(np.asarray, _optimizer().init(adapters))
        tree = {"frozen": frozen, "adapters": adapters, "opt": opt, "key": np.asarray([0, self._seed], np.uint32)}
        return {**jax.tree.map(self._spread, tree), "data": batches(self._seed)}

    def _spread(self, value: Any) -> jax.Array:
        value = np.asarray(value)
        spec = P("x") if value.ndim and value.shape[0] % self._mesh.size == 0 else P()
        return jax.make_array_from_callback(value.shape, NamedSharding(self._mesh, spec), lambda index: value[index])

    def adopt(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Returns a restored tree with its arrays in the memory of each host."""
        self._frozen = tree["frozen"]
        arrays = {name: value for name, value in tree.items() if name != "data"}
        gathered = multihost_utils.process_allgather(arrays, tiled=True) if jax.process_count() > 1 else arrays
        return {**jax.tree.map(np.asarray, gathered), "data": tree["data"]}

    def step(self, tree: dict[str, Any]) -> dict[str, Any]:
        x = jnp.asarray(next(tree["data"]))
        adapters, opt, key = _adapt(tree["adapters"], tree["opt"], tree["key"], tree["frozen"], x)
        host = jax.tree.map(np.asarray, {"adapters": adapters, "opt": opt, "key": key})
        return {"frozen": tree["frozen"], **host, "data": tree["data"]}

    def saved(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Returns the tree as it is saved: the frozen array is the restored object itself."""
        moving = {name: value for name, value in tree.items() if name not in ("frozen", "data")}
        return {"frozen": self._frozen, **jax.tree.map(self._spread, moving), "data": tree["data"]}

    def digest(self, tree: dict[str, Any]) -> str:
        return digest({name: value for name, value in tree.items() if name != "data"})


@functools.cache
def _optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-3)


@jax.jit
def _adapt(adapters: Any, opt: Any, key: jax.Array, frozen: jax.Array, x: jax.Array) -> tuple[Any, Any, jax.Array]:
    keep = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.9, (x.shape[0], WIDTH))

    def loss(weights: Any) -> jax.Array:
        hidden = x @ weights["in"]
        low = (hidden * keep) @ weights["a"] @ weights["b"]
        return jnp.mean((hidden @ frozen.astype(jnp.float32) / WIDTH + low - hidden) ** 2)

    updates, opt = _optimizer().update(jax.grad(loss)(adapters), opt, adapters)
    next_key = jax.random.key_data(jax.random.split(jax.random.wrap_key_data(key))[0])
    return optax.apply_updates(adapters, updates), opt, next_key


JOBS = {"modules": Modules, "adapters": Adapters}


def digest(tree: Any) -> str:
    """Returns a digest of every leaf's path, dtype, shape and bytes."""
    found = xxhash.xxh3_128()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        value = np.asarray(leaf)
        found.update(f"{jax.tree_util.keystr(path)} {value.dtype} {value.shape}".encode())
        found.update(value.tobytes())
    return found.hexdigest()
