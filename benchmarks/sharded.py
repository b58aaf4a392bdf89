"""One process with eight devices: a state that is spread over them, restored onto the same and onto other meshes."""

import contextlib
import os

from . import contestants, operations, workers
from .table import Row


def rows(directory: str, repeats: int) -> list[Row]:
    place = os.path.join(directory, "sharded")
    with operations.enter("sharded", contestants.WITH_SHARDINGS, place, repeats) as arena:
        steps = (operations.save, operations.warm, operations.unverified, operations.cold)
        found = [row for step in steps for row in step(arena)]
        return found + [_onto(arena, template) for template in ("4 × 2", "4 devices")]


def _onto(arena: operations.Arena, template: str) -> Row:
    """Restores onto another mesh, from the page cache."""
    with contextlib.ExitStack() as running:
        jobs = {
            name: running.enter_context(workers.job(name, arena.name, onto=template))
            for name in contestants.WITH_SHARDINGS
        }
        for name, job in jobs.items():
            job.request("check", arena.kept(name))
        runs = {name: operations.from_cache(arena, job, name) for name, job in jobs.items()}
        return arena.race(f"restore onto {template}, warm", runs)
