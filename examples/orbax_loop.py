"""A training loop as a user of Orbax writes it, saved by Treering: only the import of `ocp` differs.

A Flax NNX model and its optimizer, a Grain iterator and a configuration are the items of each step. The manager keeps
the newest step and the best two. Kill it at any time, and start it again:

    python examples/orbax_loop.py runs/orbax-loop
"""

import argparse
import pathlib

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from digest import digest
from flax import nnx

import treering.orbax as ocp  # instead of: import orbax.checkpoint as ocp

CONFIG = {"learning_rate": 3e-3, "batch_size": 32}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden, self.head = nnx.Linear(8, 64, rngs=rngs), nnx.Linear(64, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.hidden(x)))


def batches() -> grain.DatasetIterator:
    """Returns endless batches of inputs, float32[32, 8], and labels, int64[32], in a shuffled order."""
    x = np.random.default_rng(1).normal(size=(1000, 8)).astype(np.float32)
    source = grain.MapDataset.source([{"x": row, "label": np.argmax(row[:3] * row[3:6])} for row in x])
    return iter(source.shuffle(seed=2).repeat().batch(CONFIG["batch_size"]).to_iter_dataset())


@nnx.jit
def train_step(model: Net, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    def loss_of(model: Net) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"]).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def main(run: str, steps: int) -> None:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(CONFIG["learning_rate"]), wrt=nnx.Param)
    data = batches()
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=20, max_to_keep=2, best_fn=lambda metrics: metrics["loss"], best_mode="min"
    )
    with ocp.CheckpointManager(pathlib.Path(run).absolute(), options=options) as manager:
        step = manager.latest_step()
        if step is not None:
            state = nnx.state((model, optimizer))
            target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
            args = ocp.args.Composite(
                state=ocp.args.StandardRestore(target),
                data=grain.checkpoint.CheckpointRestore(data),
                config=ocp.args.JsonRestore(),
            )
            restored = manager.restore(step, args=args)
            if restored.config != CONFIG:
                raise SystemExit(f"{run}: expected the configuration {CONFIG}, found {restored.config}")
            nnx.update((model, optimizer), restored.state)
            data = restored.data
        begin = 0 if step is None else step
        print(f"begins after step {begin}")
        for step in range(begin + 1, steps + 1):
            loss = train_step(model, optimizer, jax.tree.map(jnp.asarray, next(data)))
            print(f"step {step} loss {loss:.4f}")
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(nnx.state((model, optimizer))),
                data=grain.checkpoint.CheckpointSave(data),
                config=ocp.args.JsonSave(CONFIG),
            )
            manager.save(step, args=args, metrics={"loss": float(loss)}, force=step == steps)
        manager.wait_until_finished()
        print("best", manager.best_step())
    print("digest", digest(nnx.state(model, nnx.Param)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=300)
    main(**vars(parser.parse_args()))
