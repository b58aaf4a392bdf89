import pathlib
from typing import Any

import jax.numpy as jnp
from flax import nnx

import treering as tr

from .outcomes import Case, Outcome


class _Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.dense = nnx.Linear(2, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def _trained() -> _Net:
    net = _Net()
    for _ in range(3):
        net.dropout(jnp.ones(2))
    return net


def _count(net: _Net) -> int:
    """Returns how many masks the dropout has drawn."""
    assert isinstance(net.dropout.rngs, nnx.RngStream)
    return int(net.dropout.rngs.count[...])


def reported(ocp: Any, folder: pathlib.Path) -> bool:
    resumed, trained = _Net(), _trained()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "net", nnx.to_pure_dict(nnx.state(trained, nnx.Param)))
        checkpointer.wait_until_finished()
        template = nnx.to_pure_dict(nnx.state(resumed, nnx.Param))
        nnx.update(resumed, checkpointer.restore(folder / "net", template))
    return _count(resumed) == _count(trained)


def native(folder: pathlib.Path) -> bool:
    trained = _trained()
    with tr.Checkpointer(folder / "run") as ckpts:
        ckpts.save(3, trained)
    with tr.Checkpointer(folder / "run") as ckpts:
        resumed, _ = ckpts.restore_or_init(_Net)
    return _count(resumed) == _count(trained)


CASE = Case(
    report="AI-Hypercomputer/maxtext#4343",
    summary="Random streams are not saved; dropout repeats its first masks.",
    library="Orbax in MaxText",
    version="orbax-checkpoint 0.12.8",
    today=Outcome.SILENT,
    treering=Outcome.RIGHT,
    says="rngs",
    reported=reported,
    native=native,
    about_orbax=False,
)
