import pathlib
from typing import Any

import jax
import jax.numpy as jnp

import treering as tr

from .outcomes import Case, Outcome

_EVENTS = 2**24 + 1  # no float32 has this value
_TEMPLATE: Any = {"events": jax.ShapeDtypeStruct((), jnp.float32)}


def reported(ocp: Any, folder: pathlib.Path) -> bool:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "counts", {"events": jnp.int32(_EVENTS)})
        checkpointer.wait_until_finished()
        return int(checkpointer.restore(folder / "counts", _TEMPLATE)["events"]) == _EVENTS


def native(folder: pathlib.Path) -> bool:
    tr.save(folder / "counts", {"events": jnp.int32(_EVENTS)})
    return int(tr.restore(folder / "counts", like=_TEMPLATE)["events"]) == _EVENTS


CASE = Case(
    report="SlopDotCash/asi#2714",
    summary="A restore casts an integer to the template's float and changes it.",
    library="Orbax",
    version="orbax-checkpoint 0.12.8",
    today=Outcome.SILENT,
    treering=Outcome.ERROR,
    says="events",
    reported=reported,
    native=native,
    adapter=Outcome.ERROR,
)
