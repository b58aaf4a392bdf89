"""What a save costs if most of the state is frozen: 1 GiB in 16 arrays, together with 10 MiB that is trained."""

import functools
import os
import shutil
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp

import treering as tr

from . import floor, measure, states
from .table import Row

_FROZEN, _TRAINED = "1 GiB frozen, 10 MiB trained", "10 MiB trained"
_STEPS, _FULL_SAVES = 13, 5  # saves of a loop; the first three write everything, and two wait for their deletion


def rows(directory: str, repeats: int) -> list[Row]:
    place = os.path.join(directory, "unchanged")
    os.mkdir(place)
    frozen = [jnp.full((64 << 18,), n, jnp.float32) for n in range(16)]
    found: dict[str, list[tr.SaveReport]] = {_FROZEN: [], _TRAINED: []}

    def save(state: str) -> float:
        """Saves some steps. Returns the median of the seconds of the later ones."""
        with tempfile.TemporaryDirectory(dir=place) as run, tr.Checkpointer(run, keep=tr.keep.last(2)) as ckpts:
            taken: list[float] = []
            for step in range(_STEPS):
                trained = jax.block_until_ready(jnp.full((10 << 18,), step, jnp.float32))
                tree: dict[str, Any] = {"trained": trained, **({"frozen": frozen} if state == _FROZEN else {})}
                begun = time.perf_counter()
                pending = ckpts.save(step, tree)
                assert pending
                report = pending.result()
                taken.append(time.perf_counter() - begun)
                if step >= _FULL_SAVES:
                    found[state].append(report)
            return statistics.median(taken[_FULL_SAVES:])

    def plain() -> float:
        """Writes the trained bytes without a format."""
        views = states.views(jnp.ones((10 << 18,), jnp.float32))
        with tempfile.TemporaryDirectory(dir=place) as run:
            files = (os.path.join(run, str(n)) for n in range(_STEPS - _FULL_SAVES))
            return statistics.median(
                measure.seconds(lambda file=file: floor.write_large(file, views)) for file in files
            )

    taken = measure.race({**{state: functools.partial(save, state) for state in found}, "floor": plain}, repeats)
    shutil.rmtree(place)
    stall = {state: statistics.median(one.stall_seconds for one in reports) for state, reports in found.items()}
    written = {state: float(reports[-1].nbytes - reports[-1].shared_bytes) for state, reports in found.items()}
    saved = [
        Row("durable save of a later step", state, "s", {"treering": taken[state], "floor": taken["floor"]})
        for state in found
    ]
    return saved + [
        Row(operation, state, unit, {"treering": values[state]})
        for operation, unit, values in (("stall of that save", "ms", stall), ("bytes that it writes", "MiB", written))
        for state in found
    ]
