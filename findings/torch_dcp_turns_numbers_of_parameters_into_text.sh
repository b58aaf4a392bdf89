#!/usr/bin/env bash
# torch 2.13.0, one process on a CPU.
#
# Guess: dcp_to_torch_save is the inverse of dcp.save, so optimizer.load_state_dict of what it writes goes on where the
#   optimizer was, or raises.
# Behaviour: dcp.save turns the integer keys of dicts into text. The converted optimizer state has the parameters '0' and
#   '1' instead of 0 and 1. load_state_dict accepts it without a warning, and the next step starts from empty moments.
# Why it matters: training goes on with the right weights and learning rate but without its moments, and nothing says so.
#   A reader of such checkpoints cannot tell a number from text either: the names in the checkpoint are all there is.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy
cat > "$dir/job.py" <<'PY'
import sys, warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

folder = sys.argv[1]
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())

def step(optimizer):
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return [int(state["step"]) for key, state in optimizer.state.items() if torch.is_tensor(key)]

step(optimizer), step(optimizer)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is one process
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=f"{folder}/dcp", no_dist=True)
    dcp_to_torch_save(f"{folder}/dcp", f"{folder}/model.pt")
torch.save({"optimizer": optimizer.state_dict()}, f"{folder}/direct.pt")
found = {}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for name in ("direct.pt", "model.pt"):
        state = torch.load(f"{folder}/{name}", weights_only=True)["optimizer"]
        other = torch.optim.AdamW(model.parameters())
        other.load_state_dict(state)
        found[name] = list(state["state"]), step(other)
print("keys, and the number of steps after one more:", found)
print("warnings:", [str(one.message) for one in caught])
assert found == {"direct.pt": ([0, 1], [3, 3]), "model.pt": (["0", "1"], [1, 1])} and not caught, "it behaves otherwise now"
PY
"$dir/venv/bin/python" "$dir/job.py" "$dir"
