#!/usr/bin/env bash
# jax 0.10.2 on a CPU, numpy 2.4.6.
#
# Guess: a JAX array never changes. What device_put, make_array_from_callback or make_array_from_process_local_data
#   returned for a NumPy array has its values, whatever happens to that array, or to the file that it maps.
# Behaviour: the alignment decides. They copy a large NumPy array as malloc places it, 16 bytes behind a page. Of a
#   file that np.load(file, mmap_mode="r") maps, and of a shared buffer, they keep the memory itself. When np.save
#   writes other values into that file, the arrays have these values, also those on several devices. jnp.asarray and
#   jnp.array copy.
# Why it matters: loading by mmap is how a program restores weights without holding them twice. The frozen or the best
#   weights that it keeps become those of the next save into the same file, and a batch becomes the next one where a
#   loader reuses its shared buffer. A test with arrays of np.ones passes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat > "$dir/job.py" <<'PY'
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from multiprocessing.shared_memory import SharedMemory

SIZE = 1 << 16
mesh = jax.make_mesh((2,), ("x",))
sharded = NamedSharding(mesh, PartitionSpec("x"))
makes = {
    "jnp.asarray": jnp.asarray,
    "jnp.array": jnp.array,
    "device_put": jax.device_put,
    "device_put, sharded": lambda array: jax.device_put(array, sharded),
    "callback, sharded": lambda array: jax.make_array_from_callback(array.shape, sharded, lambda box: array[box]),
    "process_local_data": lambda array: jax.make_array_from_process_local_data(sharded, array),
}


def after(source, change):
    """Returns the values of the arrays that are made of `source`, once it has changed."""
    made = {name: make(source) for name, make in makes.items()}
    jax.block_until_ready(made)
    assert all(array.sum() == SIZE for array in made.values()), "JAX behaves otherwise now"
    change()
    return {name: float(np.asarray(array)[0]) for name, array in made.items()}


file = f"{sys.argv[1]}/weights.npy"
np.save(file, np.ones(SIZE, np.float32))
mapped = np.load(file, mmap_mode="r")
found = {"a mapped file": after(mapped, lambda: np.save(file, np.full(SIZE, 2, np.float32)))}
memory = SharedMemory(create=True, size=4 * SIZE)
buffer = np.frombuffer(memory.buf, np.float32)
buffer[:] = 1
found["a shared buffer"] = after(buffer, lambda: buffer.fill(2))
memory.unlink()
block = np.empty(4 * SIZE + 64, np.uint8)
start = -block.ctypes.data % 64 + 16  # where malloc puts a large array
plain = block[start : start + 4 * SIZE].view(np.float32)
plain[:] = 1
found["a NumPy array"] = after(plain, lambda: plain.fill(2))
print("the first value of JAX arrays made when it was 1, once the source has changed to 2:")
for name, values in found.items():
    print(f"  {name + ':':16}", values)
kept = [1.0] * 6
changed = [1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
assert list(found["a NumPy array"].values()) == kept, "JAX behaves otherwise now"
for name in ("a mapped file", "a shared buffer"):
    assert list(found[name].values()) == changed, "JAX behaves otherwise now"
os._exit(0)  # The arrays still use the shared buffer, so it cannot be closed.
PY
JAX_PLATFORMS=cpu "$dir/venv/bin/python" -W ignore "$dir/job.py" "$dir" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
