#!/usr/bin/env bash
# torchdata 0.11.0 with torch 2.13.0, StatefulDataLoader with shuffle=True and a generator of its own.
#
# Guess: after load_state_dict in the middle of an epoch, that epoch and all later ones have the order that they have without
#   an interruption, whatever num_workers is.
# Behaviour: with workers this is so. With num_workers=0 the rest of the epoch is right, and the next epoch has another
#   order than in the uninterrupted job.
# Why it matters: a test that compares the rest of one epoch passes. A job that is resumed is no longer the job that it
#   was from the next epoch on, and num_workers=0 is what small jobs and tests of resuming use.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 torchdata==0.11.0 numpy==2.4.6
cat > "$dir/job.py" <<'PY'
import torch
from torchdata.stateful_dataloader import StatefulDataLoader


def make(workers):
    generator = torch.Generator().manual_seed(7)
    return StatefulDataLoader(list(range(12)), batch_size=2, shuffle=True, generator=generator, num_workers=workers)


def epoch(batches):
    return [number for batch in batches for number in batch.tolist()]


if __name__ == "__main__":
    same = {}
    for workers in (0, 2):
        first = make(workers)
        batches = iter(first)
        for _ in range(3):
            next(batches)
        state = first.state_dict()
        wanted = epoch(batches), epoch(first)
        resumed = make(workers)
        resumed.load_state_dict(state)
        found = epoch(resumed), epoch(resumed)
        same[workers] = [one == other for one, other in zip(wanted, found)]
        print(f"{workers} workers, uninterrupted: rest {wanted[0]}, next epoch {wanted[1]}")
        print(f"{workers} workers, resumed:       rest {found[0]}, next epoch {found[1]}")
    assert same == {0: [True, False], 2: [True, True]}, "torchdata behaves otherwise now"
PY
"$dir/venv/bin/python" -W ignore "$dir/job.py" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
