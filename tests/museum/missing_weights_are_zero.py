import pathlib
from typing import Any

import jax
import jax.numpy as jnp

import treering as tr

from .outcomes import Case, Outcome

_SAVED = {"embed": jnp.ones(3), "lm_head": jnp.full(2, 5.0)}
_MODEL: Any = {"embed": jax.ShapeDtypeStruct((3,), jnp.float32), "head": jax.ShapeDtypeStruct((2,), jnp.float32)}


def _filled(leaf: Any) -> Any:
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def reported(ocp: Any, folder: pathlib.Path) -> bool:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "model", _SAVED)
        found = checkpointer.restore(folder / "model", args=ocp.args.PyTreeRestore(item=_MODEL, partial_restore=True))
    return bool((jax.tree.map(_filled, found)["head"] == 5).all())


def native(folder: pathlib.Path) -> bool:
    tr.save(folder / "model", _SAVED)
    return bool((tr.restore(folder / "model", like=_MODEL)["head"] == 5).all())


CASE = Case(
    report="AI-Hypercomputer/maxtext#4341",
    summary="Orbax leaves a weight that the checkpoint lacks abstract; the trainer fills it with zeros.",
    library="Orbax in MaxText",
    version="orbax-checkpoint 0.12.8",
    today=Outcome.SILENT,
    treering=Outcome.ERROR,
    says="head",
    reported=reported,
    native=native,
    adapter=Outcome.ERROR,
)
