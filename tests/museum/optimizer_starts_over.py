import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax

import treering as tr

from .outcomes import Case, Outcome

_ADAM = optax.adam(1e-3)


def _init() -> dict[str, Any]:
    params = {"policy": jnp.zeros(3)}
    return {"params": params, "opt": _ADAM.init(params)}


def _trained() -> dict[str, Any]:
    return jax.tree.map(lambda leaf: leaf + 1, _init())


def _same(state: dict[str, Any]) -> bool:
    return not tr.diff(state, _trained())


def reported(ocp: Any, folder: pathlib.Path) -> bool:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "params", _trained()["params"])
        params = checkpointer.restore(folder / "params")
    return _same({"params": params, "opt": _ADAM.init(params)})


def native(folder: pathlib.Path) -> bool:
    with tr.Checkpointer(folder / "run") as ckpts:
        ckpts.save(1000, {"params": _trained()["params"]})  # as in the report: without the optimizer
    with tr.Checkpointer(folder / "run") as ckpts:
        state, _ = ckpts.restore_or_init(_init)
    return _same(state)


CASE = Case(
    report="google/brax#655",
    summary="The optimizer is not saved; Adam begins with empty moments.",
    library="Orbax in Brax",
    version="orbax-checkpoint 0.12.8",
    today=Outcome.SILENT,
    treering=Outcome.ERROR,
    says="opt/",
    reported=reported,
    native=native,
    about_orbax=False,
)
