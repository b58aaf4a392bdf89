#!/usr/bin/env bash
# accelerate 1.15.0 with torchdata 0.11.0 and torch 2.13.0, one process on a CPU.
#
# Guess: with use_stateful_dataloader=True, load_state brings the loader back: the rest of the epoch and the next epoch
#   have the rows of the uninterrupted job. So do use_seedable_sampler=True and skip_first_batches, the way without
#   torchdata.
# Behaviour: with shuffle=True, the resumed loader skips as many rows of a new order. So some rows of the epoch come
#   twice and others never, although the program and its seed are the same. With the seedable sampler and
#   skip_first_batches, the rest is right, and the epoch after it has the order of the resumed epoch once more. Only
#   both together go on as the uninterrupted job does, and from a state that was saved with the last batch, they repeat
#   the epoch. huggingface/accelerate#4195 reports the first of these for several processes alone.
# Why it matters: these are accelerate's two ways to resume in the middle of an epoch. The number of rows is right, and
#   so is the first one for the seedable sampler, so a test of the rest of one epoch shows nothing.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 torchdata==0.11.0 \
  accelerate==1.15.0 numpy==2.4.6
cat > "$dir/job.py" <<'PY'
import sys

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, set_seed

ROWS, BATCHES = 12, 6


def begin(options):
    AcceleratorState._reset_state(True)  # as in a new process
    GradientState._reset_state()
    set_seed(1)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    return accelerator, accelerator.prepare(torch.utils.data.DataLoader(list(range(ROWS)), batch_size=2, shuffle=True))


def rows(loader, accelerator=None, folder=None, after=0):
    found = []
    for number, batch in enumerate(loader, 1):
        found += batch.tolist()
        if number == after:
            accelerator.save_state(folder)
    return found


def case(name, options, after):
    """Returns the rows of two epochs, and those that follow a state saved after some batches of the first one."""
    folder = f"{sys.argv[1]}/{name}-{after}"
    accelerator, loader = begin(options)
    wanted = rows(loader, accelerator, folder, after) + rows(loader)
    accelerator, loader = begin(options)
    accelerator.load_state(folder)
    stateful = "use_stateful_dataloader" in options
    found = rows(loader if stateful else accelerator.skip_first_batches(loader, after)) + rows(loader)
    used = 2 * after
    same = [found[: ROWS - used] == wanted[used:ROWS], found[ROWS - used :] == wanted[ROWS:]]
    print(f"{name}, a state saved after {after} of {BATCHES} batches:")
    print("  used", wanted[:used], "- rest", wanted[used:ROWS], "- next epoch", wanted[ROWS:])
    print("  resumed:", found)
    return wanted, found, same


stateful, seedable = {"use_stateful_dataloader": True}, {"use_seedable_sampler": True}
wanted, found, same = case("stateful", stateful, 2)
again = set(wanted[:4]) & set(found[:8])
print("  rows of the epoch that come again:", sorted(again))
assert same == [False, False] and again, "accelerate behaves otherwise now"
wanted, found, same = case("seedable", seedable, 2)
assert same == [True, False] and found[8:] == wanted[:ROWS], "accelerate behaves otherwise now"
assert case("both", stateful | seedable, 2)[2] == [True, True], "accelerate behaves otherwise now"
wanted, found, _ = case("both", stateful | seedable, BATCHES)
assert found[:ROWS] == wanted[:ROWS] and found[ROWS:] == wanted[ROWS:], "accelerate behaves otherwise now"
PY
export HF_HOME="$dir/home" HF_HUB_OFFLINE=1
"$dir/venv/bin/python" -W ignore "$dir/job.py" "$dir" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
