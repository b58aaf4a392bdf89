import pathlib
from typing import Any

import jax.numpy as jnp

import treering as tr

from .outcomes import Case, Outcome


def _state(step: int) -> dict[str, Any]:
    return {"w": jnp.full(3, float(step))}


def reported(ocp: Any, folder: pathlib.Path) -> bool:
    def newest(temporary: str) -> Any:
        found = []
        for root in (folder / "permanent", folder / temporary):
            with ocp.CheckpointManager(root) as manager:
                if (step := manager.latest_step()) is not None:
                    found.append((step, manager.restore(step, args=ocp.args.StandardRestore(_state(0)))))
        return max(found, key=lambda pair: pair[0])[1]

    for root, step in (("permanent", 10), ("temporary-here", 13)):
        with ocp.CheckpointManager(folder / root) as manager:
            manager.save(step, args=ocp.args.StandardSave(_state(step)))
    return bool((newest("temporary-there")["w"] == 13).all())  # The job restarts in another region.


def native(folder: pathlib.Path) -> bool:
    keep = tr.keep.last(1) | tr.keep.every(10)  # one run: temporary steps are those that retention deletes
    with tr.Checkpointer(folder / "run", keep=keep) as ckpts:
        for step in (10, 13):
            ckpts.save(step, _state(step))
    with tr.Checkpointer(folder / "run", keep=keep) as ckpts:
        state, _ = ckpts.restore_or_init(lambda: _state(0))
    return bool((state["w"] == 13).all())


CASE = Case(
    report="marin-community/marin#5217",
    summary="Newer steps are in another region; the job resumes from an older one.",
    library="Levanter; here Orbax",
    version="orbax-checkpoint 0.12.8",
    today=Outcome.SILENT,
    treering=Outcome.RIGHT,
    says="step",
    reported=reported,
    native=native,
    about_orbax=False,
)
