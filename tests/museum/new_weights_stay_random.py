import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import treering as tr

from .outcomes import Case, Outcome

_LINEN = {"norm": {"scale": jnp.full(2, 5.0), "bias": jnp.zeros(2)}, "out": {"kernel": jnp.full((2, 2), 5.0)}}


class _Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm = nnx.LayerNorm(2, rngs=rngs)
        self.output = nnx.Linear(2, 2, use_bias=False, rngs=rngs)


def reported(ocp: Any, folder: pathlib.Path) -> bool:
    net = _Net()
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "linen", _LINEN)
        # The template has arrays, so a check for leaves that are still abstract finds none.
        template = nnx.to_pure_dict(nnx.state(net, nnx.Param))
        found = checkpointer.restore(folder / "linen", args=ocp.args.PyTreeRestore(item=template, partial_restore=True))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))
    nnx.update(net, found)
    return bool((net.output.kernel[...] == 5).all())


def native(folder: pathlib.Path) -> bool:
    net = _Net()
    tr.save(folder / "linen", _LINEN)
    nnx.update(net, tr.restore(folder / "linen", like=nnx.state(net, nnx.Param)))
    return bool((net.output.kernel[...] == 5).all())


CASE = Case(
    report="AI-Hypercomputer/maxtext#4342",
    summary="A Linen checkpoint lacks a weight of an NNX model; the model keeps its random one.",
    library="Orbax in MaxText",
    version="orbax-checkpoint 0.12.8",
    today=Outcome.SILENT,
    treering=Outcome.ERROR,
    says="output",
    reported=reported,
    native=native,
    adapter=Outcome.WARNING,
)
