#!/usr/bin/env bash
# torch 2.13.0 with gloo, two processes on CPUs; torch.distributed.checkpoint.
#
# Guess: what is no DTensor, and differs between ranks, is saved as rank 0 has it, as with torch.save on rank 0.
# Behaviour: each tensor, number or object is saved by the rank that has the least to write so far. So the checkpoint
#   of one BatchNorm layer under DistributedDataParallel has the running mean of rank 0 and the variance of rank 1. The
#   position of the loader is that of rank 1. With other tensors in the state, the choice is another. Nothing is logged.
# Why it matters: running statistics, generators and positions of loaders differ between ranks in every data-parallel
#   job. The checkpoint has a combination that no rank ever had, and a reader of it cannot tell.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$dir/job.py" <<'PY'
import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

def save(rank, folder, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(rank)
    layer = torch.nn.BatchNorm1d(4)
    model = torch.nn.parallel.DistributedDataParallel(layer)
    model(torch.randn(8, 4) + 10 * rank).sum().backward()
    state = {"mean": layer.running_mean, "loader": {"used": 100 + rank}, "variance": layer.running_var}
    every = [None, None]
    dist.all_gather_object(every, {name: repr(value) for name, value in state.items()})
    dcp.save(state, checkpoint_id=f"{folder}/saved")
    dcp.load(state, checkpoint_id=f"{folder}/saved")
    if rank == 0:
        found = {name: [n for n in (0, 1) if every[n][name] == repr(value)] for name, value in state.items()}
        print("PyTorch", torch.__version__)
        print("the ranks whose value was saved:", found)
        assert found == {"mean": [0], "loader": [1], "variance": [1]}, "PyTorch behaves otherwise now"
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torch.multiprocessing.spawn(save, (sys.argv[1], port), 2)
PY
"$dir/venv/bin/python" -W ignore "$dir/job.py" "$dir" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
