#!/usr/bin/env bash
# flax 0.12.8, flax.nnx with jax 0.10.2.
#
# Guess: nnx.state and nnx.split return the values at that moment, because JAX arrays never change. nnx.update with them
#   brings the model back after it has been trained further.
# Behaviour: they return the model's own variables. Each step of training changes what was kept, so nnx.update changes
#   nothing, and a model that nnx.merge makes of it is trained along. A copy by jax.tree.map, nnx.to_pure_dict or
#   nnx.clone keeps the values.
# Why it matters: a job that keeps its last good state in memory, to go back after a NaN, goes back to the NaN. Weights
#   that are kept as the best, or for an average, are the newest. Flax 0.10 returned copies.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet flax==0.12.8 jax==0.10.2 jaxlib==0.10.2 optax==0.2.8
cat > "$dir/job.py" <<'PY'
import jax
import jax.numpy as jnp
import optax
from flax import nnx

model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


@nnx.jit
def train(model, optimizer, x):
    optimizer.update(model, nnx.grad(lambda model: (model(x) ** 2).sum())(model))


def is_finite(kernel):
    return bool(jnp.isfinite(jnp.asarray(kernel)).all())


kept = {
    "nnx.state": nnx.state(model),
    "nnx.split": nnx.split(model)[1],
    "jax.tree.map": jax.tree.map(lambda leaf: leaf, nnx.state(model)),
    "nnx.to_pure_dict": nnx.to_pure_dict(nnx.state(model)),
}
cloned = nnx.clone(model)
train(model, optimizer, jnp.full((1, 2), jnp.nan))
found = {name: is_finite(state["kernel"][...]) for name, state in kept.items()}
found["nnx.clone"] = is_finite(cloned.kernel[...])
nnx.update(model, kept["nnx.state"])
after_update = is_finite(model.kernel[...])
nnx.update(model, kept["jax.tree.map"])
after_copy = is_finite(model.kernel[...])
print("kept before a step with NaN, and finite after it:", found)
print("the model is finite after nnx.update with nnx.state:", after_update, "- with a copy of it:", after_copy)
assert list(found.values()) == [False, False, True, True, True], "Flax behaves otherwise now"
assert not after_update and after_copy, "Flax behaves otherwise now"
PY
JAX_PLATFORMS=cpu "$dir/venv/bin/python" -W ignore "$dir/job.py" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
