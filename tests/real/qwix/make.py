"""Writes `lora.safetensors`, `expected.json`, with qwix 0.1.8 and Flax 0.12.8. The tests do not run it.

The file has the `nnx.LoRAParam`s of a model with a linear layer and an einsum, whose rank is 4 and whose alpha is 6.
`expected.json` records the layers' kernels, an input and the model's output.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).parent


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q_proj = nnx.Linear(6, 5, use_bias=False, rngs=rngs)
        self.heads = nnx.Einsum("bi,ihd->bhd", (5, 2, 3), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.heads(self.q_proj(x))


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 6))
    provider = qwix.LoraProvider(
        module_path=".*", rank=4, alpha=6.0, lora_b_initializer=jax.nn.initializers.normal(1.0)
    )
    model = qwix.apply_lora_to_model(Model(nnx.Rngs(0)), provider, x, rngs=nnx.Rngs(1))
    lora = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    save_file({"/".join(path): np.asarray(value[...]) for path, value in lora}, HERE / "lora.safetensors")
    found = {"x": x, "y": model(x), "q_proj": model.q_proj.kernel[...], "heads": model.heads.kernel[...]}
    (HERE / "expected.json").write_text(
        json.dumps({key: jnp.asarray(value).tolist() for key, value in found.items()}) + "\n"
    )


if __name__ == "__main__":
    main()
