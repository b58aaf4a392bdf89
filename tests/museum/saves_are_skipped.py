import pathlib
from typing import Any

import jax.numpy as jnp

import treering as tr

from .outcomes import Case, Outcome


def _state(step: int) -> dict[str, Any]:
    return {"w": jnp.full(3, float(step))}


def reported(ocp: Any, folder: pathlib.Path) -> bool:
    with ocp.CheckpointManager(folder / "run") as manager:
        for step in (10, 20):
            manager.save(step, args=ocp.args.StandardSave(_state(step)))
        manager.wait_until_finished()
        manager.restore(10, args=ocp.args.StandardRestore(_state(0)))  # The job goes back to step 10.
        for step in (12, 15):
            manager.save(step, args=ocp.args.StandardSave(_state(step)))
    with ocp.CheckpointManager(folder / "run") as manager:
        latest = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(_state(0)))
    return bool((latest["w"] == 15).all())


def native(folder: pathlib.Path) -> bool:
    with tr.Checkpointer(folder / "run") as ckpts:
        for step in (10, 20):
            ckpts.save(step, _state(step))
        ckpts.restore(_state(0), step=10)
        for step in (12, 15):
            ckpts.save(step, _state(step))
    with tr.Checkpointer(folder / "run") as ckpts:
        latest, _ = ckpts.restore_or_init(lambda: _state(0))
    return bool((latest["w"] == 15).all())


CASE = Case(
    report="AI-Hypercomputer/maxtext#5260",
    summary="After a return to an earlier step, saves up to the latest step are skipped.",
    library="Orbax in MaxText",
    version="orbax-checkpoint 0.12.8",
    today=Outcome.SILENT,
    treering=Outcome.RIGHT,
    says="step",
    reported=reported,
    native=native,
    adapter=Outcome.WARNING,
)
