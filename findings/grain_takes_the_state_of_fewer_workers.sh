#!/usr/bin/env bash
# grain 0.2.18, an IterDataset with mp_prefetch.
#
# Guess: set_state with the state of a pipeline with 2 worker processes fails on a pipeline with 4, or the iterator
#   continues at the same element.
# Behaviour: it is accepted. The iterator skips elements without a word, and may fail later. With fewer workers than
#   before, it raises an IndexError at once.
# Why it matters: the number of workers is set by the machine. A job that resumes on a larger one trains on other data than
#   the interrupted job would have, and nothing says so.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet grain==0.2.18 jax==0.10.2 jaxlib==0.10.2
cat > "$dir/job.py" <<'PY'
import json

import grain
from absl import flags

def make(workers):
    options = grain.MultiprocessingOptions(num_workers=workers)
    return iter(grain.MapDataset.range(24).to_iter_dataset().mp_prefetch(options))

def rest(iterator):
    found = []
    try:
        for element in iterator:
            found.append(int(element))
    except Exception as error:
        found.append(type(error).__name__)
    return found

if __name__ == "__main__":
    flags.FLAGS.mark_as_parsed()
    first = make(2)
    used = [int(next(first)) for _ in range(6)]
    state = first.get_state()
    wanted = rest(first)
    more, fewer = make(4), make(1)
    more.set_state(state)
    found = rest(more)
    try:
        fewer.set_state(state)
        refused = "no error"
    except Exception as error:
        refused = type(error).__name__
    print("used:", used)
    print("the rest with 2 workers:              ", wanted)
    print("the rest with 4 workers and this state:", found)
    print("with 1 worker, set_state raises:", refused)
    assert wanted == list(range(6, 24)) and found != wanted and refused == "IndexError", "Grain behaves otherwise now"
PY
JAX_PLATFORMS=cpu "$dir/venv/bin/python" -W ignore "$dir/job.py" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
