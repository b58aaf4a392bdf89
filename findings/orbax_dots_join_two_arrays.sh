#!/usr/bin/env bash
# orbax-checkpoint 0.12.8 with jax 0.10.2, StandardCheckpointer with its default settings.
#
# Guess: {"a.b": x} and {"a": {"b": y}} in one tree are two arrays, as the metadata has the path of each as a list, or the
#   save raises.
# Behaviour: both are saved under the name a.b. The save succeeds, and restore gives both places the same values: one of
#   the two arrays is lost. A tree with either of them alone comes back as it was.
# Why it matters: names with dots come from PyTorch's state dicts. A tree that has converted weights next to nested ones
#   loses an array, and the values of another are in its place.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2
cat > "$dir/job.py" <<'PY'
import sys

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp


def restored(tree, name):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{sys.argv[1]}/{name}", tree)
        checkpointer.wait_until_finished()
        return jax.tree.map(float, checkpointer.restore(f"{sys.argv[1]}/{name}", tree))


dotted, nested = {"a.b": jnp.float32(1)}, {"a": {"b": jnp.float32(2)}}
found = restored({**dotted, **nested}, "both")
alone = restored(dotted, "dotted"), restored(nested, "nested")
print("saved together:", {"a": {"b": 2.0}, "a.b": 1.0})
print("restored:      ", found)
print("saved apart and restored:", *alone)
assert alone == ({"a.b": 1}, {"a": {"b": 2}}), "Orbax behaves otherwise now"
assert found["a.b"] == found["a"]["b"], "Orbax keeps both now"
PY
JAX_PLATFORMS=cpu "$dir/venv/bin/python" -W ignore "$dir/job.py" "$dir/saved" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
