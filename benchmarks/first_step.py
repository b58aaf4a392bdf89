"""The time until a restarted job can take its first step: restored before it is compiled, or in a thread meanwhile.

Each round is a process of its own, because a process compiles a step once.
"""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import treering as tr

from . import measure, objects
from .table import Row

_LAYERS = 32


def rows(directory: str, repeats: int) -> list[Row]:
    """Returns medians over as many processes, with the page cache empty, and with a bucket that answers late."""
    found: list[Row] = []
    local = os.path.join(directory, "first-step")
    _save(local, 2048)
    found += _rows(f"{_size(2048)}, cold", local, repeats, {})
    with objects.slow_bucket() as (here, there, environment):
        _save(f"{here}/first-step", 1024)
        found += _rows(f"{_size(1024)} in a bucket, 50 ms a request", f"{there}/first-step", repeats, environment)
    return found


def _save(path: str, width: int) -> None:
    import numpy as np

    layers = [np.full((2, width, width), n / 1e5, np.float32) for n in range(_LAYERS)]
    tr.save(path, {"layers": layers})


def _size(width: int) -> str:
    return f"{_LAYERS} layers, {2 * 4 * _LAYERS * width**2 >> 20} MiB"


def _rows(state: str, path: str, repeats: int, environment: dict[str, str]) -> list[Row]:
    def run(how: str) -> float:
        if "://" not in path:
            measure.drop_cache(path)
        command = [sys.executable, "-m", "benchmarks.first_step", how, path]
        everything = {**os.environ, **environment, "JAX_ENABLE_COMPILATION_CACHE": "false"}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=everything)
        return json.loads(done.stdout)

    ways = ("compile", "restore", "one after the other", "together")
    times = measure.race({how: lambda how=how: run(how) for how in ways}, repeats)
    floor = max(times["compile"], times["restore"])
    name = "time to the first step"
    return [
        Row(f"{name}: restore, then compile", state, "s", {"treering": times["one after the other"], "floor": floor}),
        Row(f"{name}: restore in a thread", state, "s", {"treering": times["together"], "floor": floor}),
    ]


def _child(how: str, path: str) -> float:
    import jax
    import jax.numpy as jnp

    width = tr.open(path)["layers/0"].shape[-1]
    like = {"layers": [jax.ShapeDtypeStruct((2, width, width), jnp.float32)] * _LAYERS}
    jax.block_until_ready(jnp.zeros(1))  # the backend has begun

    def loss(tree: Any, x: jax.Array) -> jax.Array:
        for a, b in tree["layers"]:
            x = x + jnp.tanh(x @ a) @ b
            x = x / jnp.sqrt(jnp.mean(x * x) + 1e-6)
        return jnp.mean(x**2)

    def step(tree: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - 1e-3 * g, tree, jax.grad(loss)(tree, x))

    def compiled() -> Any:
        return jax.jit(step).lower(like, jax.ShapeDtypeStruct((8, width), jnp.float32)).compile()

    def restored() -> Any:
        return jax.block_until_ready(tr.restore(path, like))

    begun = time.perf_counter()
    if how == "compile":
        compiled()
    elif how == "restore":
        restored()
    elif how == "one after the other":
        restored()
        compiled()
    else:
        with ThreadPoolExecutor(1) as pool:
            restoring = pool.submit(restored)
            compiled()
            restoring.result()
    return time.perf_counter() - begun


if __name__ == "__main__":
    print(json.dumps(_child(*sys.argv[1:])))
