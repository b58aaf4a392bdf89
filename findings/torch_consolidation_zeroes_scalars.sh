#!/usr/bin/env bash
# PyTorch 2.13.0, torch.distributed.checkpoint's HuggingFaceStorageWriter with enable_consolidation=True.
#
# Guess: the consolidated file has the values of the files in `sharded`, which it is made from.
# Behaviour: a tensor without axes (a step count, a logit scale, a quantization scale) is 0 in the consolidated file.
#   Nothing is logged. The file in `sharded` has the right value, and so does a vector with one element.
# Why it matters: the consolidated file is the one that is published. CLIP's logit_scale, for example, has no axes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 safetensors==0.8.0 numpy==2.4.6
cat > "$dir/job.py" <<'PY'
import glob
import sys

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

folder = sys.argv[1]
state = {"logit_scale": torch.tensor(4.6), "vector": torch.tensor([4.6])}
writer = HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
dcp.save(state, storage_writer=writer, no_dist=True)
print("PyTorch", torch.__version__)
found = {}
for name in ("sharded", "consolidated"):
    (file,) = glob.glob(f"{folder}/{'sharded/' if name == 'sharded' else ''}*.safetensors")
    found[name] = {key: one.tolist() for key, one in safetensors.torch.load_file(file).items()}
    print(f"{name + ':':14}", found[name])
assert found["sharded"]["logit_scale"] > 4 and found["consolidated"]["vector"][0] > 4, "PyTorch behaves otherwise now"
assert found["consolidated"]["logit_scale"] == 0, "PyTorch keeps the value now"
PY
"$dir/venv/bin/python" -W ignore "$dir/job.py" "$dir/saved" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
