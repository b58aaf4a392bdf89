#!/usr/bin/env bash
# jax 0.10.2 on two virtual devices of one CPU.
#
# Guess: a step that donates an array takes all of it or nothing. A NumPy view of one shard keeps the array or does not:
#   is_deleted() says which, and JAX warns if it could not use what was donated.
# Behaviour: donation is decided for each shard. The shard with a view stays, the other one is taken. The array says
#   is_deleted() False, and reading it raises RuntimeError about a deleted array. There is no warning, although the step
#   used new memory for the shard that stayed. A view of a replicated array spares the copy of its device alone. Once
#   nothing holds the view, the next array is donated as usual.
# Why it matters: a checkpoint that is written in the background holds such views. A loop that asks is_deleted() before
#   it saves or retries after an interrupted step takes half of an array for a complete one, and a writer of shards can
#   read some of them before it meets the error.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat > "$dir/job.py" <<'PY'
import warnings

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2,), ("data",))
step = jax.jit(lambda x: x + 1, donate_argnums=0)


def readable(array):
    try:
        np.asarray(array)
    except RuntimeError as error:
        print("  reading it:", str(error).split(" with ")[0])
        return False
    return True


def case(name, spec, hold):
    array = jax.device_put(np.arange(8.0), NamedSharding(mesh, spec))
    shards = [shard.data for shard in array.addressable_shards]
    before = [shard.unsafe_buffer_pointer() for shard in shards]
    view = hold(shards)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        after = jax.block_until_ready(step(array))
    reused = [s.data.unsafe_buffer_pointer() == p for s, p in zip(after.addressable_shards, before, strict=True)]
    taken = [shard.is_deleted() for shard in shards]
    print(f"{name}: array deleted {array.is_deleted()}, shards deleted {taken}, memory reused {reused}")
    found = (array.is_deleted(), readable(array), taken, reused, len(seen))
    del view
    return found


asked = {
    "sharded, nothing held": (P("data"), lambda shards: None, (True, False, [True, True], [True, True], 0)),
    "sharded, a view of shard 0": (P("data"), lambda s: np.asarray(s[0]), (False, False, [False, True], [False, True], 0)),
    "replicated, a view of copy 0": (P(), lambda s: np.asarray(s[0]), (False, True, [False, True], [False, True], 0)),
    "sharded, a view that is gone": (P("data"), lambda s: float(np.asarray(s[0])[0]), (True, False, [True, True], [True, True], 0)),
}
found = {name: case(name, spec, hold) for name, (spec, hold, _) in asked.items()}
for name, (_, _, wanted) in asked.items():
    assert found[name] == wanted, f"the behaviour has changed: {name}: {found[name]}"
PY
XLA_FLAGS=--xla_force_host_platform_device_count=2 JAX_PLATFORMS=cpu "$dir/venv/bin/python" "$dir/job.py"
