"""LoRA: trains and saves adapters, while the base weights stay in their safetensors file.

The file has the names and the layout of a Hugging Face model. Rules translate them while the file is read. A step
contains the adapters and the optimizer's state. A resumed job reads the base weights from the file again. Kill it at
any time, and start it again:

    python examples/lora.py runs/lora
"""

import argparse
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digest import digest

import treering as tr

VOCABULARY, WIDTH, LAYERS, RANK = 64, 32, 3, 4
optimizer = optax.adam(1e-2)

FROM_HUGGING_FACE = [
    tr.rules.rename(r"^model\.embed_tokens\.weight$", "embed"),
    tr.rules.rename(r"^model\.layers\.(\d+)\.mlp\.(up|down)_proj\.weight$", r"layers/\1/\2"),
    tr.rules.transpose("layers/*/*", (1, 0)),  # PyTorch stores [out, in].
    tr.rules.stack("layers/*/*"),  # `jax.lax.scan` needs one array for all layers.
]


def make_model(path: str) -> None:
    """Writes a small model, in place of a download."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for n in range(LAYERS):
        shapes[f"model.layers.{n}.mlp.up_proj.weight"] = (4 * WIDTH, WIDTH)
        shapes[f"model.layers.{n}.mlp.down_proj.weight"] = (WIDTH, 4 * WIDTH)
    rng = np.random.default_rng(0)
    tr.save(path, {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()})


def load_model(path: str) -> dict[str, Any]:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layers = {"up": array(LAYERS, WIDTH, 4 * WIDTH), "down": array(LAYERS, 4 * WIDTH, WIDTH)}
    return tr.restore(path, like={"embed": array(VOCABULARY, WIDTH), "layers": layers}, rules=FROM_HUGGING_FACE)


def init() -> dict[str, Any]:
    def adapter(seed: int, inner: int, outer: int) -> dict[str, jax.Array]:
        a = 0.1 * jax.random.normal(jax.random.key(seed), (LAYERS, inner, RANK))
        return {"a": a, "b": jnp.zeros((LAYERS, RANK, outer))}

    lora = {"up": adapter(1, WIDTH, 4 * WIDTH), "down": adapter(2, 4 * WIDTH, WIDTH)}
    return {"lora": lora, "opt": optimizer.init(lora)}


def loss_of(lora: Any, frozen: Any, tokens: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        kernels, adapters = weights

        def dense(name: str, x: jax.Array) -> jax.Array:
            return x @ kernels[name] + x @ adapters[name]["a"] @ adapters[name]["b"]

        return x + dense("down", jax.nn.gelu(dense("up", x))), None

    x, _ = jax.lax.scan(layer, frozen["embed"][tokens], (frozen["layers"], lora))
    logits, labels = x @ frozen["embed"].T, (3 * tokens + 1) % VOCABULARY
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def train_step(state: Any, frozen: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    loss, grads = jax.value_and_grad(loss_of)(state["lora"], frozen, tokens)
    updates, opt = optimizer.update(grads, state["opt"])
    return {"lora": optax.apply_updates(state["lora"], updates), "opt": opt}, loss


def main(run: str, steps: int, model: str | None) -> None:
    if model is None:
        model = f"{run}/model.safetensors"
        if not os.path.exists(model):
            make_model(model)
    frozen = load_model(model)
    with tr.Checkpointer(run, save_every=20, keep=tr.keep.last(2), save_on_preemption=True) as ckpts:
        state, step = ckpts.restore_or_init(init)
        print(f"begins after step {step}")
        for step in range(step + 1, steps + 1):
            tokens = jax.random.randint(jax.random.key(step), (64,), 0, VOCABULARY)
            state, loss = train_step(state, frozen, tokens)
            print(f"step {step} loss {loss:.4f}")
            ckpts.save(step, state, metrics={"loss": loss}, force=step == steps)
            if ckpts.preempted:  # A SIGTERM arrived. This step is being saved even if `save_every` would skip it.
                raise SystemExit("stopped by SIGTERM; start it again to continue")
        ckpts.finish()
    print("digest", digest((frozen, state["lora"])))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--model", help="a safetensors file; without one, a small one is made")
    main(**vars(parser.parse_args()))
