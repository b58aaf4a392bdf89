"""Restores only the parameters, on one device, from a run that eight devices saved with the optimizer's state.

The rest is not read: the optimizer's moments, two thirds of the bytes, stay on the disk.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/params_only.py runs/eight --save
    python examples/params_only.py runs/eight
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
from digest import digest
from jax.sharding import NamedSharding, PartitionSpec

import treering as tr

optimizer = optax.adam(1e-3)


def init() -> dict[str, Any]:
    one, two, three = jax.random.split(jax.random.key(0), 3)
    blocks = {"up": jax.random.normal(one, (4, 64, 256)), "down": jax.random.normal(two, (4, 256, 64))}
    params = {"embed": jax.random.normal(three, (512, 64)), "blocks": blocks}
    return {"params": params, "opt": optimizer.init(params)}


@jax.jit
def train_step(state: dict[str, Any]) -> dict[str, Any]:
    grads = jax.tree.map(jnp.sin, state["params"])  # They stand for the gradients of a loss.
    updates, opt = optimizer.update(grads, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}


def save(run: str) -> Any:
    """Trains on all devices and saves, as a job would. Returns the parameters."""
    mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(jax.sharding.AxisType.Auto,))

    def where(path: str, shape: tuple[int, ...], dtype: Any) -> NamedSharding:
        """Splits the last axis over the devices. Scalars are replicated."""
        return NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - 1), "model") if shape else PartitionSpec())

    with tr.Checkpointer(run) as ckpts:
        state, step = ckpts.restore_or_init(init, sharding=where)
        state = train_step(state)
        ckpts.save(step + 1, state)
    return state["params"]


def load(run: str) -> Any:
    """Restores the parameters of the latest step. The template has only shapes, so nothing is initialized."""
    like = jax.eval_shape(init)["params"]
    return tr.restore(run, like=like, at="params")


def main(run: str, saving: bool) -> None:
    params = save(run) if saving else load(run)
    print(tr.open(run).at("params"))
    print("devices", len(params["embed"].devices()))
    print("digest", digest(params))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the directory of the checkpoints")
    parser.add_argument("--save", action="store_true", help="train and save on all devices")
    options = parser.parse_args()
    main(options.run, options.save)
