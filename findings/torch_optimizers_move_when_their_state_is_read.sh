#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.checkpoint.state_dict; one process on a CPU.
#
# Guess: get_optimizer_state_dict reads the state of the optimizer and changes nothing. A job that saves a checkpoint
#   before its first step trains like one that does not.
# Behaviour: if the optimizer has no state yet, the call makes one by a step with gradients of zero and a learning rate
#   of zero. That step counts. The first real step of Adam is corrected as if it were the second, SGD dampens the first
#   gradient, and Rprop and ASGD keep a step size of about zero, so ASGD's first step does not move the weights at all.
#   optimizer.state_dict() changes nothing. pytorch/torchtitan#4382 mends its own copy of this code for Adam.
# Why it matters: a checkpoint of step 0 is common, to test that saving works or to keep the initial weights. It
#   changes the training that it is to protect, by a quarter of Adam's first step. Both jobs look right.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$dir/job.py" <<'PY'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def moved(make, read):
    """Returns how far the first step moves a weight, and if it is where it was before the state was read."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = make(model.parameters(), lr=0.1)
    if read:
        read(model, optimizer)
    assert model.weight.item() == 1, "PyTorch behaves otherwise now"
    model(torch.ones(1)).sum().backward()
    optimizer.step()
    return round(1 - model.weight.item(), 6)


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, dampening=0.5)


reads = (None, lambda model, optimizer: optimizer.state_dict(), get_optimizer_state_dict)
optim = torch.optim
makes = {"Adam": optim.Adam, "SGD": momentum, "Adagrad": optim.Adagrad, "ASGD": optim.ASGD, "Rprop": optim.Rprop}
found = {name: [moved(make, read) for read in reads] for name, make in makes.items()}
print("PyTorch", torch.__version__)
for name, (alone, direct, distributed) in found.items():
    after = f"after optimizer.state_dict() {direct}, after get_optimizer_state_dict {distributed}"
    print(f"{name:8} first step {alone}, {after}")
assert all(alone == direct and alone > 0.09 for alone, direct, _ in found.values()), "PyTorch behaves otherwise now"
ratios = {name: round(last / first, 2) for name, (first, _, last) in found.items()}
print("the first step, as a part of what it should be:", ratios)
assert ratios == {"Adam": 0.74, "SGD": 0.5, "Adagrad": 1, "ASGD": 0, "Rprop": 0}, "PyTorch behaves otherwise now"
PY
"$dir/venv/bin/python" -W ignore "$dir/job.py" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
