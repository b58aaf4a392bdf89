"""A Flax NNX module and its `nnx.Optimizer`, with batch statistics and dropout, that resume.

NNX objects are saved and restored as objects, without `nnx.split` and `nnx.merge`. The random streams are part of the
module, so the masks of the dropout continue too. Kill it at any time, and start it again:

    python examples/flax_nnx.py runs/nnx
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
from digest import digest
from flax import nnx

import treering as tr


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(8, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(64, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def init() -> dict[str, Any]:
    model = Net(nnx.Rngs(0))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)}


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """Returns the inputs, float32[32, 8], and labels, int32[32], of a step. They depend on the step only."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), step), (32, 8))
    return x, jnp.argmax(x[:, :3] * x[:, 3:6], axis=1)


def loss_of(model: Net, x: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()


@nnx.jit
def train_step(model: Net, optimizer: nnx.Optimizer, x: jax.Array, labels: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_of)(model, x, labels)
    optimizer.update(model, grads)
    return loss


def main(run: str, steps: int) -> None:
    with tr.Checkpointer(run, save_every=20, keep=tr.keep.last(2), save_on_preemption=True) as ckpts:
        state, step = ckpts.restore_or_init(init)
        print(f"begins after step {step}")
        for step in range(step + 1, steps + 1):
            loss = train_step(state["model"], state["optimizer"], *batch(step))
            print(f"step {step} loss {loss:.4f}")
            ckpts.save(step, state, metrics={"loss": loss}, force=step == steps)
            if ckpts.preempted:  # A SIGTERM arrived. This step is being saved even if `save_every` would skip it.
                raise SystemExit("stopped by SIGTERM; start it again to continue")
        ckpts.finish()
    print("digest", digest(nnx.state(state["model"], nnx.Param, nnx.BatchStat)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=300)
    main(**vars(parser.parse_args()))
