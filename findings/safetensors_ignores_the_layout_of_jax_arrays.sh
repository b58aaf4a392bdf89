#!/usr/bin/env bash
# safetensors 0.8.0 with jax 0.10.2 on a CPU.
#
# Guess: safetensors.flax.save of any JAX array that has one device saves its values. The layout in memory is the
#   compiler's business and no part of the value.
# Behaviour: NumPy sees an array that jit or device_put gave a column-major layout as column-major, and safetensors
#   writes the memory as it lies, with the shape of the array. load returns the same numbers in another order. It is the
#   same for a transposed NumPy array with safetensors.numpy, which safetensors/safetensors#825 reports; 0.7 saved both
#   right. flax.serialization saves both right.
# Why it matters: layouts are chosen for speed, by a program or by the compiler for Layout.AUTO, and weights are
#   published as safetensors. The file is valid, its shapes and its sums are right, and the model is ruined.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet safetensors==0.8.0 jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 numpy==2.4.6
cat > "$dir/job.py" <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.flax
import safetensors.numpy
from flax import serialization
from jax.experimental.layout import Format, Layout

rows = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
columns = Format(Layout(major_to_minor=(1, 0)), rows.sharding)
saved = {
    "row-major": rows,
    "column-major by device_put": jax.device_put(rows, columns),
    "column-major by jit": jax.jit(lambda array: array * 1, out_shardings=columns)(rows),
}
found = safetensors.flax.load(safetensors.flax.save(dict(saved)))
by_flax = serialization.msgpack_restore(serialization.msgpack_serialize(dict(saved)))
for name in saved:
    print(f"{name}: {found[name].tolist()}, by flax.serialization {by_flax[name].tolist()}")
transposed = np.arange(6, dtype=np.float32).reshape(3, 2).T
by_numpy = safetensors.numpy.load(safetensors.numpy.save({"transposed": transposed}))["transposed"]
print(f"transposed with NumPy: saved {transposed.tolist()}, loaded {by_numpy.tolist()}")
wanted = rows.tolist()
assert all(array.tolist() == wanted for array in (*saved.values(), *by_flax.values())), "JAX behaves otherwise now"
right, put, jitted = (found[name].tolist() for name in saved)
assert right == wanted and put == jitted == [[0, 3, 1], [4, 2, 5]], "safetensors behaves otherwise now"
assert by_numpy.tolist() == [[0, 1, 2], [3, 4, 5]] != transposed.tolist(), "safetensors behaves otherwise now"
PY
JAX_PLATFORMS=cpu "$dir/venv/bin/python" -W ignore "$dir/job.py" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
