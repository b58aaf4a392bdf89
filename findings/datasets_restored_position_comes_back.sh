#!/usr/bin/env bash
# datasets 5.2.0, an IterableDataset.
#
# Guess: after load_state_dict(state), state_dict() returns that state. The first pass begins at its position, and each
#   later pass at the beginning of the data.
# Behaviour: until the next pass has begun, state_dict() returns the start of the data. Each later pass of the same object
#   begins at the restored position again, so the first elements are never seen any more, unless set_epoch is called
#   before each pass.
# Why it matters: a job that is stopped again before it has taken an element saves the start of the data. A job that was
#   resumed in the middle of an epoch trains on the rest of the data alone, in each epoch until its end, without an error.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet datasets==5.2.0
export HF_HOME="$dir/home" HF_HUB_OFFLINE=1
"$dir/venv/bin/python" - <<'PY'
import datasets

def make():
    return datasets.Dataset.from_dict({"x": list(range(6))}).to_iterable_dataset()

first = make()
elements = iter(first)
for _ in range(4):
    next(elements)
state = first.state_dict()

resumed = make()
resumed.load_state_dict(state)
is_start = resumed.state_dict() == make().state_dict()
passes = [[row["x"] for row in resumed] for _ in range(3)]

counted = make()
counted.load_state_dict(state)
with_epochs = []
for epoch in range(3):
    counted.set_epoch(epoch)
    with_epochs.append([row["x"] for row in counted])

print("state_dict() right after load_state_dict() is that of a new dataset:", is_start)
print("passes of the resumed dataset:       ", passes)
print("passes with set_epoch before each one:", with_epochs)
assert is_start and passes[0] == [4, 5] and passes[1] == passes[2] == [4, 5], "datasets behaves otherwise now"
assert with_epochs[0] == [4, 5] and with_epochs[1:] == [[0, 1, 2, 3, 4, 5]] * 2, "datasets behaves otherwise now"
PY
