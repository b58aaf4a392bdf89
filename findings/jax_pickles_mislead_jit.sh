#!/usr/bin/env bash
# jax 0.10.2, a pickled array.
#
# Guess: what a jitted function returns depends on its arguments alone. A pickle of jnp.asarray(0.1), which is weakly
#   typed, comes back as an array that behaves like the original, since it says weak_type=True.
# Behaviour: its weak type counts when a function is traced, but not when JAX looks for a compiled one. After a call
#   with it, the same function returns bfloat16 for a float32 that is not weak, where it must return float32. After a
#   call with that float32, it returns float32 for the unpickled array. With the original array, and with
#   copy.deepcopy or device_put of it, the order of the calls does not matter.
# Why it matters: states are pickled to keep them, and to send them to workers. A resumed job can compute in another
#   precision than a fresh one, and an evaluation of other weights before the first step decides which.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat > "$dir/job.py" <<'PY'
import copy
import pickle

import jax
import jax.numpy as jnp

weights = jnp.ones(2, jnp.bfloat16)
weak, strong = jnp.asarray(0.1), jnp.float32(0.1)


def dtypes(*factors):
    """The dtypes that one jitted function returns for the factors, one call after the other."""
    multiply = jax.jit(lambda weights, factor: weights * factor)
    return [str(multiply(weights, factor).dtype) for factor in factors]


wanted = [["bfloat16", "float32"], ["float32", "bfloat16"]]
same = {}
arrays = {
    "the original": weak,
    "copy.deepcopy": copy.deepcopy(weak),
    "device_put": jax.device_put(weak, jax.devices()[0]),
    "pickle": pickle.loads(pickle.dumps(weak)),
}
for name, array in arrays.items():
    assert array.weak_type and not strong.weak_type and array.dtype == strong.dtype, "JAX behaves otherwise now"
    found = [dtypes(array, strong), dtypes(strong, array)]
    same[name] = found == wanted
    print(f"{name + ':':14} weak, then not weak: {found[0]}; not weak, then weak: {found[1]}")
assert list(same.values()) == [True, True, True, False], "JAX behaves otherwise now"
assert found == [["bfloat16", "bfloat16"], ["float32", "float32"]], "JAX behaves otherwise now"
PY
JAX_PLATFORMS=cpu "$dir/venv/bin/python" -W ignore "$dir/job.py" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
