"""A Flax Linen `TrainState` that resumes, in a run that keeps the step with the best score of an evaluator.

Kill it at any time, and start it again. `evaluator.py` may run at the same time:

    python examples/flax_linen.py runs/linen
    python examples/evaluator.py runs/linen
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
from digest import digest
from flax import linen as nn
from flax.training import train_state

import treering as tr


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(nn.Dense(64)(x)))
        return nn.Dense(1)(x)[:, 0]


class TrainState(train_state.TrainState):
    key: jax.Array


def init() -> TrainState:
    net = Net()
    params = net.init(jax.random.key(0), jnp.zeros((1, 16)))["params"]
    return TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(3e-3), key=jax.random.key(1))


def load_data(seed: int, n: int) -> tuple[jax.Array, jax.Array]:
    """Returns inputs, float32[n, 16], and noisy targets, float32[n]. If `n` is small, the net soon learns the noise."""
    inputs, noise = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(inputs, (n, 16))
    return x, x[:, 0] + jnp.sin(x[:, 1]) + jax.random.normal(noise, (n,))


@jax.jit
def train_step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        key = jax.random.fold_in(state.key, state.step)
        return ((state.apply_fn({"params": params}, x, train=True, rngs={"dropout": key}) - y) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def main(run: str, steps: int) -> None:
    x, y = load_data(seed=2, n=64)
    # A step without "val/loss" is kept, however long the evaluator takes.
    keep = tr.keep.last(2) | tr.keep.best(1, "val/loss", "min")
    with tr.Checkpointer(run, save_every=20, keep=keep, save_on_preemption=True) as ckpts:
        state, step = ckpts.restore_or_init(init)
        print(f"begins after step {step}")
        for step in range(step + 1, steps + 1):
            state, loss = train_step(state, x, y)
            print(f"step {step} loss {loss:.4f}")
            ckpts.save(step, state, metrics={"loss": loss}, force=step == steps)
            if ckpts.preempted:  # A SIGTERM arrived. This step is being saved even if `save_every` would skip it.
                raise SystemExit("stopped by SIGTERM; start it again to continue")
        ckpts.finish()  # It ends the evaluator's loop: no more steps will come.
    print("digest", digest(state.params))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=300)
    main(**vars(parser.parse_args()))
