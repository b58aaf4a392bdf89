"""One process with eight devices: a state that is spread over them, restored onto the same and onto other meshes.

It runs in a process of its own (`python -m benchmarks.sharded`), for the number of devices is settled when JAX starts.
"""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import warnings

import jax
import numpy as np
from jax.sharding import Mesh

from . import contestants, measure, operations, states
from .operations import Arena
from .table import Row

_DEVICES = 8
_OTHERS = {"4 × 2": ((4, 2), ("x", "y")), "4 devices": ((4,), ("x",))}  # sizes of a mesh, and how arrays are cut


def rows(directory: str, repeats: int) -> list[Row]:
    place = os.path.join(directory, "sharded")
    command = [sys.executable, "-m", "benchmarks.sharded", place, str(repeats)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=with_devices(_DEVICES))
    shutil.rmtree(place)
    return [Row(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def with_devices(count: int) -> dict[str, str]:
    """The environment of a process with so many CPU devices."""
    return {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}


def _child(directory: str, repeats: int) -> None:
    warnings.simplefilter("ignore")
    state = states.make_sharded(states.sharded(_mesh(_DEVICES), "x"))
    arena = operations.enter("sharded", state, contestants.with_shardings(state), directory, repeats)
    found = [*operations.save(arena), *operations.warm(arena), *operations.cold(arena)]
    found += [_onto(arena, name, _mesh(*sizes), spec) for name, (sizes, spec) in _OTHERS.items()]
    print(json.dumps([dataclasses.asdict(row) for row in found]))


def _mesh(*sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), ("x", "y")[: len(sizes)])


def _onto(arena: Arena, name: str, mesh: Mesh, spec: tuple[str, ...]) -> Row:
    """Restores onto another mesh, from the page cache."""
    template = states.sharded(mesh, *spec)
    entered = contestants.with_shardings(template)
    for contestant in entered:
        restored = contestant.restore(arena.kept(contestant.name))
        states.check(arena.state, restored, contestant.name)
        assert restored["layer_00"].sharding == template["layer_00"].sharding

    def run(contestant: contestants.Contestant) -> float:
        measure.fill_cache(arena.kept(contestant.name))
        return measure.seconds(lambda: contestant.restore(arena.kept(contestant.name)))

    return arena.row(f"restore onto {name}, warm", {c.name: functools.partial(run, c) for c in entered})


if __name__ == "__main__":
    _child(sys.argv[1], int(sys.argv[2]))
