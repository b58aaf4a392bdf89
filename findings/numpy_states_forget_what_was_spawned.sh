#!/usr/bin/env bash
# numpy 2.4.6, numpy.random.Generator.
#
# Guess: bit_generator.state is the state of the generator: a generator of the same seed that gets it goes on like the
#   one that was saved, whatever is called next. It does, for every distribution.
# Behaviour: spawn() takes its children from the seed sequence, which counts them. The state has no such count. After a
#   restore, spawn() gives the first children again, with the same numbers. In a generator of another seed, which gets
#   the state, it gives children of that other seed. pickle and copy.deepcopy keep the count.
# Why it matters: rng.spawn(workers) in each epoch is how NumPy's guide gives streams to workers. The state is what
#   checkpoints keep, because it is plain numbers, which fit into JSON. A resumed job augments its data with the random
#   numbers of its first epochs again. A test that compares the next numbers passes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet numpy==2.4.6
cat > "$dir/job.py" <<'PY'
import copy
import json
import pickle

import numpy as np


def epoch(generator):
    """Returns one number of the generator itself and one of each of its two workers."""
    return generator.random(), *(worker.random() for worker in generator.spawn(2))


def by_state(generator, seed):
    other = np.random.default_rng(seed)
    other.bit_generator.state = json.loads(json.dumps(generator.bit_generator.state))
    return other


uninterrupted = np.random.default_rng(7)
first = epoch(uninterrupted)
restored = {
    "state": by_state(uninterrupted, 7),
    "state, seed 8": by_state(uninterrupted, 8),
    "pickle": pickle.loads(pickle.dumps(uninterrupted)),
    "deepcopy": copy.deepcopy(uninterrupted),
}
second = epoch(uninterrupted)
found = {name: epoch(generator) for name, generator in restored.items()}
for name, numbers in {"epoch 1": first, "epoch 2": second, **found}.items():
    print(f"{name + ':':15}", ", ".join(f"{number:.6f}" for number in numbers))
assert found["pickle"] == found["deepcopy"] == second, "NumPy behaves otherwise now"
assert found["state"][0] == found["state, seed 8"][0] == second[0], "NumPy behaves otherwise now"
assert found["state"][1:] == first[1:] != second[1:], "NumPy keeps what was spawned now"
assert not {*found["state, seed 8"][1:]} & {*first, *second}, "NumPy keeps the seed now"
PY
"$dir/venv/bin/python" "$dir/job.py"
