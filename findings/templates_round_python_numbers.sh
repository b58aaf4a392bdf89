#!/usr/bin/env bash
# orbax-checkpoint 0.12.8 (v0 and v1), equinox 0.13.8 with jax 0.10.2; flax 0.12.8 for comparison.
#
# Guess: a Python float that was saved comes back as that float, or the restore raises, because the template has an int
#   there.
# Behaviour: the template's literal decides. With 1 in the template, a saved 0.75 comes back as 0, and 2.5 as 2. With
#   True in the template, Orbax and Equinox give True for 0.75. With an int32 array in the template, Orbax gives an
#   array with 0, while Equinox raises. Flax gives 0.75 each time.
# Why it matters: `scale = 1` and `temperature = 1` are how programs write the start of what is a float later. The
#   resumed job continues with a temperature of 0, or with a clipping or a loss scale that is rounded, and without an
#   error. A test that restores the initial state passes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet orbax-checkpoint==0.12.8 equinox==0.13.8 flax==0.12.8 jax==0.10.2 \
  jaxlib==0.10.2 numpy==2.4.6
cat > "$dir/job.py" <<'PY'
import io
import itertools
import sys

import equinox
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import serialization
from orbax.checkpoint.experimental import v1

folders = (f"{sys.argv[1]}/{number}" for number in itertools.count())


def by_orbax(state, template):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder := next(folders), state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder, template)


def by_orbax_v1(state, template):
    v1.save_pytree(folder := next(folders), state)
    return v1.load_pytree(folder, template)


def by_equinox(state, template):
    file = io.BytesIO()
    equinox.tree_serialise_leaves(file, state)
    file.seek(0)
    return equinox.tree_deserialise_leaves(file, template)


def by_flax(state, template):
    return serialization.from_bytes(template, serialization.to_bytes(state))


def restored(by, value, template):
    try:
        found = by({"scale": value}, {"scale": template})["scale"]
    except Exception as error:
        return type(error).__name__
    return found if isinstance(found, bool | int | float) else f"array {found}"


found = {}
for by in (by_orbax, by_orbax_v1, by_equinox, by_flax):
    pairs = ((0.75, 1.0), (0.75, 1), (2.5, 1), (0.75, True), (0.75, jnp.int32(1)))
    found[by.__name__] = [restored(by, *pair) for pair in pairs]
    texts = [f"{value} for {template!r}: {one!r}" for (value, template), one in zip(pairs, found[by.__name__])]
    print(f"{by.__name__ + ':':12}", ", ".join(texts))
orbax = [0.75, 0, 2, True, "array 0"]
types = [type(one) for one in orbax]
assert found["by_orbax"] == found["by_orbax_v1"] == orbax, "Orbax behaves otherwise now"
for by in ("by_orbax", "by_orbax_v1"):
    assert [type(one) for one in found[by]] == types, "Orbax behaves otherwise now"
assert found["by_equinox"][:4] == orbax[:4] and "Error" in found["by_equinox"][4], "Equinox behaves otherwise now"
assert found["by_flax"] == [0.75, 0.75, 2.5, 0.75, 0.75], "Flax behaves otherwise now"
PY
export JAX_PLATFORMS=cpu
"$dir/venv/bin/python" -W ignore "$dir/job.py" "$dir" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
