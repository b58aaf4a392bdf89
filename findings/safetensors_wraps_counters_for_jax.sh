#!/usr/bin/env bash
# safetensors 0.8.0 with jax 0.10.2, which has 64-bit types off.
#
# Guess: safetensors.flax.load of an int64 that no int32 holds raises, as jnp.asarray(2**40 + 5) does, or warns.
# Behaviour: it gives an int32 of the low bits: 5, without a word. 2**32 + 1 as uint64 is 1. safetensors.numpy reads the
#   same bytes right.
# Why it matters: a count of tokens passes 2**31 early in a training run, and 64-bit seeds soon do. A state that NumPy or
#   PyTorch wrote comes into JAX with another count, and a schedule that depends on it starts again.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet safetensors==0.8.0 jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 numpy==2.4.6
cat > "$dir/job.py" <<'PY'
import warnings

import jax.numpy as jnp
import numpy as np
import safetensors.flax
import safetensors.numpy

saved = {"tokens": np.array([2**40 + 5]), "seed": np.array([2**32 + 1], np.uint64)}
data = safetensors.numpy.save(saved)
try:
    refused = jnp.asarray(2**40 + 5)
except OverflowError as error:
    refused = type(error).__name__
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = safetensors.flax.load(data)
right = safetensors.numpy.load(data)
print("jnp.asarray of the Python number raises:", refused)
for name, value in saved.items():
    print(f"{name}: saved {value}, safetensors.numpy {right[name]}, safetensors.flax {found[name]} {found[name].dtype}")
print("warnings:", [str(one.message) for one in caught])
assert refused == "OverflowError" and all(right[name] == saved[name] for name in saved), "it behaves otherwise now"
assert found["tokens"].tolist() == [5] and found["seed"].tolist() == [1] and not caught, "safetensors behaves otherwise now"
PY
JAX_PLATFORMS=cpu "$dir/venv/bin/python" "$dir/job.py" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
