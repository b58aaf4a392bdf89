#!/usr/bin/env bash
# flax 0.12.8, flax.serialization; safetensors 0.8.0 for comparison.
#
# Guess: to_bytes and from_bytes give back the values of a NumPy array whatever its byte order is, or raise.
# Behaviour: the bytes are written as they lie in memory and the type by its name, which says nothing of their order. Of a
#   big-endian array, from_bytes makes other numbers in the same shape. A NumPy scalar taken out of that array
#   comes back right, and so does the array through safetensors.
# Why it matters: FITS, classic netCDF and IDX files, and some of HDF5, hold big-endian arrays, which NumPy computes with
#   like with others. A mean or a table that was read from one and kept in the state as a NumPy array is wrong after a
#   restore, without an error.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet flax==0.12.8 jax==0.10.2 jaxlib==0.10.2 safetensors==0.8.0 numpy==2.4.6
cat > "$dir/job.py" <<'PY'
import numpy as np
import safetensors.numpy
from flax import serialization

state = {"mean": np.array([1, 2], ">f4"), "count": np.array([1], ">i4")}
state["scalar"] = state["mean"][0]
found = serialization.from_bytes(state, serialization.to_bytes(state))
arrays = {name: state[name] for name in ("mean", "count")}
other = safetensors.numpy.load(safetensors.numpy.save(arrays))
for name, value in state.items():
    print(f"{name}: saved {value}, restored {found[name]} as {found[name].dtype}")
print("through safetensors:", other)
assert all(np.array_equal(other[name], array) for name, array in arrays.items()), "safetensors behaves otherwise now"
assert found["scalar"] == 1 and found["count"].tolist() == [1 << 24], "Flax behaves otherwise now"
assert found["mean"].dtype == np.float32 and found["mean"].max() < 1e-40, "Flax behaves otherwise now"
PY
JAX_PLATFORMS=cpu "$dir/venv/bin/python" -W ignore "$dir/job.py" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
