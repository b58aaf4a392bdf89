"""Fine-tunes parameters that a colleague saved with Orbax, and saves them so that Orbax can read them.

Only the encoder is restored. The colleague's optimizer state and old head are not read. The result is in Orbax's format
because of `write="orbax"`; without it, it would be in Treering's.

    python examples/orbax_finetune.py runs/pretrained --pretrain
    python examples/orbax_finetune.py runs/pretrained runs/tuned
    python examples/orbax_finetune.py runs/tuned --check
"""

import argparse
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from digest import digest
from flax import linen as nn

import treering.orbax as ocp  # instead of: import orbax.checkpoint as ocp


class Net(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(64, name="encoder")(x))
        return nn.Dense(self.classes, name="head")(x)


def init(classes: int) -> Any:
    return Net(classes).init(jax.random.key(classes), jnp.zeros((1, 16)))["params"]


def pretrain(path: pathlib.Path) -> None:
    """Writes parameters and the state of an optimizer with Orbax itself, as the colleague does."""
    import orbax.checkpoint

    params = init(classes=10)
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params), "step": 1000}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    print("encoder", digest(params["encoder"]))


def tune(pretrained: pathlib.Path, tuned: pathlib.Path, steps: int) -> None:
    params = init(classes=3)
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.metadata(pretrained).item_metadata
        print("found", *found)
        item = {"params": {"encoder": params["encoder"]}}
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        args = ocp.args.PyTreeRestore(item, restore_args=restore_args, partial_restore=True)
        encoder = checkpointer.restore(pretrained, args=args)["params"]["encoder"]
    print("encoder", digest(encoder))
    params |= {"encoder": encoder}

    optimizer = optax.adam(1e-2)
    state = optimizer.init(params)
    x = jax.random.normal(jax.random.key(0), (64, 16))
    labels = jnp.argmax(x[:, :3], axis=1)

    @jax.jit
    def train_step(params: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            logits: Any = Net(classes=3).apply({"params": params}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    for step in range(1, steps + 1):
        params, state, loss = train_step(params, state)
        print(f"step {step} loss {loss:.4f}")
    with ocp.StandardCheckpointer(write="orbax") as checkpointer:
        checkpointer.save(tuned, params, force=True)
    print("digest", digest(params))


def check(tuned: pathlib.Path) -> None:
    """Reads the tuned parameters with Orbax itself, as the colleague does."""
    import orbax.checkpoint

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        print("digest", digest(checkpointer.restore(tuned, init(classes=3))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="the checkpoint to read, or to write with --pretrain")
    parser.add_argument("tuned", nargs="?", help="the checkpoint to write")
    parser.add_argument("--pretrain", action="store_true", help="write the colleague's checkpoint")
    parser.add_argument("--check", action="store_true", help="read a tuned checkpoint with Orbax")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    path = pathlib.Path(options.path).absolute()  # Orbax needs absolute paths.
    if options.pretrain:
        pretrain(path)
    elif options.check:
        check(path)
    else:
        tune(path, pathlib.Path(options.tuned).absolute(), options.steps)
