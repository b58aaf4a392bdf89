"""An Equinox model, an optax optimizer and a Grain pipeline that resume to the same bits.

The data iterator is a leaf of the state like any other. A restarted job gets the batches that the killed one would have
got, with the same shuffling and augmentation. Kill it at any time, and start it again with the same command:

    python examples/equinox_optax.py runs/equinox
"""

import argparse
from typing import Any

import equinox as eqx
import grain
import jax
import numpy as np
import optax
from digest import digest

import treering as tr

optimizer = optax.adamw(3e-3)


def load_data() -> Any:
    """Makes an endless iterator over noisy points of a sine, float32[32, 2]."""
    x = np.linspace(-3, 3, 1000, dtype=np.float32)
    points = np.stack([x, np.sin(x)], axis=1)

    def add_noise(point: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return point + rng.normal(0, 0.05, 2).astype(np.float32)

    dataset = grain.MapDataset.source(points).seed(0).shuffle().random_map(add_noise).repeat().batch(32)
    return iter(dataset.to_iter_dataset())


def init() -> dict[str, Any]:
    model = eqx.nn.MLP(1, 1, width_size=32, depth=2, key=jax.random.key(0))
    return {"model": model, "opt": optimizer.init(eqx.filter(model, eqx.is_array)), "data": load_data()}


def loss_of(model: eqx.nn.MLP, batch: jax.Array) -> jax.Array:
    return ((jax.vmap(model)(batch[:, :1]) - batch[:, 1:]) ** 2).mean()


@eqx.filter_jit(donate="all")
def train_step(model: eqx.nn.MLP, opt: Any, batch: jax.Array) -> tuple[eqx.nn.MLP, Any, jax.Array]:
    loss, grads = eqx.filter_value_and_grad(loss_of)(model, batch)
    updates, opt = optimizer.update(grads, opt, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt, loss


def main(run: str, steps: int) -> None:
    with tr.Checkpointer(run, save_every=20, keep=tr.keep.last(2), save_on_preemption=True) as ckpts:
        state, step = ckpts.restore_or_init(init)
        print(f"begins after step {step}")
        for step in range(step + 1, steps + 1):
            state["model"], state["opt"], loss = train_step(state["model"], state["opt"], next(state["data"]))
            print(f"step {step} loss {loss:.4f}")
            ckpts.save(step, state, metrics={"loss": loss}, force=step == steps)
            if ckpts.preempted:  # A SIGTERM arrived. This step is being saved even if `save_every` would skip it.
                raise SystemExit("stopped by SIGTERM; start it again to continue")
        ckpts.finish()
    print("digest", digest(state["model"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=300)
    main(**vars(parser.parse_args()))
