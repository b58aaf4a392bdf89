#!/usr/bin/env bash
# grain 0.2.18 with orbax-checkpoint 0.12.8, ConcatThenSplitIterDataset saved by Grain's own CheckpointSave.
#
# Guess: CheckpointRestore continues at the element at which CheckpointSave was called, as set_state does with the
#   state of get_state. A checkpoint of an iterator that gave nothing yet gives everything.
# Behaviour: the state has tuples, and (-1, -1) stands for "nothing is left over". Grain writes its states as JSON,
#   which makes lists of them, and [-1, -1] is not equal to (-1, -1). Where the state says that nothing is left over,
#   the restored iterator drops the entire document that comes next. So does one that gave nothing yet. Where something
#   is left over, and with set_state in memory, nothing is lost.
# Why it matters: this is how sequences for language models are packed, and how Grain's guide saves iterators. Each
#   restart loses a document without an error, and a test that sets the state in memory passes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet grain==0.2.18 orbax-checkpoint==0.12.8 jax==0.10.2 \
  jaxlib==0.10.2 numpy==2.4.6
cat > "$dir/job.py" <<'PY'
import sys

import grain
import numpy as np
import orbax.checkpoint as ocp
from absl import flags
from grain.experimental import ConcatThenSplitIterDataset

LENGTHS = [4, 1, 3, 3, 4]


def make():
    documents = grain.MapDataset.range(5).map(lambda n: {"tokens": np.full(LENGTHS[n], n)})
    return iter(ConcatThenSplitIterDataset(documents.to_iter_dataset(), length_struct={"tokens": 5}))


def rest(iterator):
    return [sequence["tokens"].tolist() for sequence in iterator]


def in_memory(state):
    iterator = make()
    iterator.set_state(state)
    return rest(iterator)


def by_checkpoint(iterator, folder):
    restored = make()
    with ocp.CheckpointManager(folder) as manager:
        manager.save(0, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(iterator)))
        manager.wait_until_finished()
        manager.restore(0, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(restored)))
    return rest(restored)


flags.FLAGS.mark_as_parsed()
same = []
for used in range(4):
    iterator = make()
    for _ in range(used):
        next(iterator)
    state, saved = iterator.get_state(), by_checkpoint(iterator, f"{sys.argv[1]}/{used}")
    wanted = rest(iterator)
    same.append((in_memory(state) == wanted, saved == wanted))
    print(f"after {used} sequences, the rest:   {wanted}")
    print(f"{'by a checkpoint of Grain:':28}{saved}")
assert same == [(True, False)] * 3 + [(True, True)], "Grain behaves otherwise now"
PY
JAX_PLATFORMS=cpu "$dir/venv/bin/python" -W ignore "$dir/job.py" "$dir" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
