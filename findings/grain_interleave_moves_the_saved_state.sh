#!/usr/bin/env bash
# grain 0.2.18, InterleaveIterDataset.
#
# Guess: the state that set_state takes stays as it is while the iterator goes on, as with other iterators of Grain, so the
#   same state can be set again.
# Behaviour: the iterator keeps parts of that state and changes them with each element. The second set_state with the same
#   object goes on elsewhere and leaves elements out. A copy taken before the first one works each time.
# Why it matters: a job that goes back to its last good step more than once keeps the state in memory. The second time,
#   it trains on other data; a save that writes the object later stores a position that never was.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet grain==0.2.18 jax==0.10.2 jaxlib==0.10.2
cat > "$dir/job.py" <<'PY'
import copy

import grain
from absl import flags
from grain.experimental import InterleaveIterDataset


def twice(make, copies):
    first = iter(make())
    for _ in range(3):
        next(first)
    state = first.get_state()
    wanted = [int(one) for one in first]
    found = []
    for _ in range(2):
        iterator = iter(make())
        iterator.set_state(copy.deepcopy(state) if copies else state)
        found.append([int(one) for one in iterator])
    return wanted, *found


def interleaved():
    parts = [grain.MapDataset.range(start, start + 5).to_iter_dataset() for start in (0, 10, 20)]
    return InterleaveIterDataset(parts, cycle_length=2)


def mixed():
    return grain.IterDataset.mix([grain.MapDataset.range(5).to_iter_dataset() for _ in range(2)], [1, 1])


flags.FLAGS.mark_as_parsed()
wanted, once, again = twice(interleaved, False)
copied, other = twice(interleaved, True), twice(mixed, False)
print("the rest, uninterrupted:          ", wanted)
print("after set_state:                  ", once)
print("after set_state of the same state:", again)
print("with copies, and with mix:        ", copied[2] == copied[0], other[2] == other[0])
assert once == wanted and copied[1] == copied[2] == copied[0], "Grain behaves otherwise now"
assert other[1] == other[2] == other[0] and again != wanted, "Grain behaves otherwise now"
PY
JAX_PLATFORMS=cpu "$dir/venv/bin/python" -W ignore "$dir/job.py" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
