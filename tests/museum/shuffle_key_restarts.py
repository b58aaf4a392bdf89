import pathlib
from typing import Any

import jax
import jax.numpy as jnp

import treering as tr

from .outcomes import Case, Outcome


def _init() -> dict[str, Any]:
    return {"w": jnp.zeros(3), "key": jax.random.key(0)}


def _trained(steps: int) -> dict[str, Any]:
    state = _init()
    for _ in range(steps):  # Each batch is shuffled with a key of its own.
        state = {"w": state["w"] + 1, "key": jax.random.split(state["key"])[0]}
    return state


def _same(state: dict[str, Any]) -> bool:
    return not tr.diff(state, _trained(3))


def reported(ocp: Any, folder: pathlib.Path) -> bool:
    with ocp.CheckpointManager(folder / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": _trained(3)["w"]}))
    with ocp.CheckpointManager(folder / "run") as manager:
        found = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore({"w": jnp.zeros(3)}))
    return _same({**_init(), **found})


def native(folder: pathlib.Path) -> bool:
    with tr.Checkpointer(folder / "run") as ckpts:
        ckpts.save(3, _trained(3))
    with tr.Checkpointer(folder / "run") as ckpts:
        state, _ = ckpts.restore_or_init(_init)
    return _same(state)


CASE = Case(
    report="google/tunix#2288",
    summary="The key of the shuffle is not saved; it repeats.",
    library="Orbax in Tunix",
    version="orbax-checkpoint 0.12.8",
    today=Outcome.SILENT,
    treering=Outcome.RIGHT,
    says="key",
    reported=reported,
    native=native,
    about_orbax=False,
)
