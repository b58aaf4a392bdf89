#!/usr/bin/env bash
# orbax-checkpoint 0.12.8 (v0 and v1), flax 0.12.8, equinox 0.13.8 with jax 0.10.2.
#
# Guess: a state that is restored into a template of the same program has the dtypes and weak types of the template, so
#   the next step returns the dtypes that it would have returned without an interruption.
# Behaviour: jnp.asarray(0.1), and jnp.array(0.1) too, is a weakly typed float32: bfloat16 weights times it stay
#   bfloat16. All four restore it as a float32 that is not weak, also from a template. The first step after the restore
#   turns the weights into float32.
# Why it matters: a temperature, a decay or a loss scale in the state is enough. The resumed job needs twice the memory
#   for its weights and computes otherwise, and nothing says so. No test that compares values with those saved sees it.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet jax==0.10.2 jaxlib==0.10.2 orbax-checkpoint==0.12.8 flax==0.12.8 \
  equinox==0.13.8 numpy==2.4.6
cat > "$dir/job.py" <<'PY'
import io
import sys

import equinox
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import serialization
from orbax.checkpoint.experimental import v1

folder = sys.argv[1]
state = {"weights": jnp.ones(2, jnp.bfloat16), "decay": jnp.asarray(0.1)}
assert state["decay"].weak_type and jnp.array(0.1).weak_type, "JAX behaves otherwise now"


def step(state):
    return jax.jit(lambda state: {**state, "weights": state["weights"] * state["decay"]})(state)


def by_orbax():
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{folder}/v0", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(f"{folder}/v0", state)


def by_orbax_v1():
    v1.save_pytree(f"{folder}/v1", state)
    return v1.load_pytree(f"{folder}/v1", state)


def by_equinox():
    file = io.BytesIO()
    equinox.tree_serialise_leaves(file, state)
    file.seek(0)
    return equinox.tree_deserialise_leaves(file, state)


found = {
    "not saved": state,
    "Orbax": by_orbax(),
    "Orbax v1": by_orbax_v1(),
    "Flax": serialization.from_bytes(state, serialization.to_bytes(state)),
    "Equinox": by_equinox(),
}
dtypes = {name: str(step(one)["weights"].dtype) for name, one in found.items()}
print("weights after the next step:", dtypes)
assert all(one["weights"].dtype == jnp.bfloat16 and one["decay"] == state["decay"] for one in found.values())
assert list(dtypes.values()) == ["bfloat16"] + ["float32"] * 4, "one of them behaves otherwise now"
PY
export JAX_PLATFORMS=cpu
"$dir/venv/bin/python" -W ignore "$dir/job.py" "$dir" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
