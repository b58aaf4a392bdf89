"""A separate process that scores every step of a run of `flax_linen.py`, so that the run keeps the best one.

It only reads the parameters and adds a metric. The training job never waits for it. Kill it and start it again: steps
with a score are not scored again. It ends when the run is finished.

    python examples/evaluator.py runs/linen
"""

import argparse
from typing import Any

import jax
from flax_linen import Net, init, load_data

import treering as tr


@jax.jit
def evaluate(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return ((Net().apply({"params": params}, x) - y) ** 2).mean()


def main(run: str) -> None:
    x, y = load_data(seed=3, n=1000)
    like = jax.eval_shape(init).params
    for ckpt in tr.follow(run):  # It yields existing steps, and then waits for new ones.
        if "val/loss" in ckpt.metrics:
            continue
        try:
            loss = evaluate(ckpt.restore(like, at="params"), x, y)
        except tr.errors.NotFoundError:  # The training job has deleted the step meanwhile, as its `keep` says.
            print(f"step {ckpt.step} is gone")
            continue
        if ckpt.record({"val/loss": loss}):
            print(f"step {ckpt.step} val/loss {loss:.4f}")
    print("best", tr.Checkpointer(run).best_step("val/loss", "min"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the directory of the checkpoints; it need not exist yet")
    main(**vars(parser.parse_args()))
