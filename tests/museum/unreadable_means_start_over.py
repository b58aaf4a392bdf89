import pathlib
from typing import Any

import jax.numpy as jnp

import treering as tr

from .outcomes import Case, Outcome

_TRAINED, _INIT = {"w": jnp.ones(1000)}, {"w": jnp.zeros(1000)}


def _lose_arrays(run: pathlib.Path) -> None:
    """Deletes the files of the arrays and leaves the descriptions, as a torn copy does."""
    lost = [file for file in run.rglob("*") if file.parent.name == "d" or file.name.startswith("arrays-")]
    assert lost
    for file in lost:
        file.unlink()


def reported(ocp: Any, folder: pathlib.Path) -> bool:
    with ocp.CheckpointManager(folder / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave(_TRAINED))
    _lose_arrays(folder / "run")
    with ocp.CheckpointManager(folder / "run") as manager:
        try:
            state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(_INIT))
        except (FileNotFoundError, ValueError):  # meant for the first launch, which has no checkpoint
            state = _INIT
    return bool((state["w"] == 1).all())


def native(folder: pathlib.Path) -> bool:
    with tr.Checkpointer(folder / "run") as ckpts:
        ckpts.save(1, _TRAINED)
    _lose_arrays(folder / "run")
    with tr.Checkpointer(folder / "run") as ckpts:
        state, _ = ckpts.restore_or_init(lambda: _INIT)
    return bool((state["w"] == 1).all())


CASE = Case(
    report="marin-community/marin#8760",
    summary="An unreadable checkpoint counts as none; the job starts over.",
    library="Levanter; here Orbax",
    version="orbax-checkpoint 0.12.8",
    today=Outcome.SILENT,
    treering=Outcome.ERROR,
    says="arrays-|array file",
    reported=reported,
    native=native,
    adapter=Outcome.ERROR,
)
