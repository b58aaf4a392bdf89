import pathlib
from typing import Any

import jax.numpy as jnp
from flax.training import checkpoints

import treering as tr

from .outcomes import Case, Outcome

_TRAINED, _INIT = {"w": jnp.ones(3)}, {"w": jnp.zeros(3)}


def reported(ocp: Any, folder: pathlib.Path) -> bool:
    checkpoints.save_checkpoint(folder / "pretrained", _TRAINED, step=100)
    state = checkpoints.restore_checkpoint(folder / "pretrained_model", _INIT)  # another name
    return bool((state["w"] == 1).all())


def native(folder: pathlib.Path) -> bool:
    with tr.Checkpointer(folder / "pretrained") as ckpts:
        ckpts.save(100, _TRAINED)
    return bool((tr.restore(folder / "pretrained_model", like=_INIT)["w"] == 1).all())


CASE = Case(
    report="google/flax#1631",
    summary="For a path without a checkpoint, a restore returns the template.",
    library="Flax",
    version="flax 0.12.8",
    today=Outcome.SILENT,
    treering=Outcome.ERROR,
    says="pretrained_model",
    reported=reported,
    native=native,
    about_orbax=False,
)
