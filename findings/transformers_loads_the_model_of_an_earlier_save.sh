#!/usr/bin/env bash
# transformers 5.24.0, save_pretrained twice into one folder; huggingface_hub 2.4.0.
#
# Guess: from_pretrained loads what the last save_pretrained wrote, as it does if both wrote one file or both several.
# Behaviour: if the first save wrote model.safetensors and the second one shards with an index, the first file stays, and
#   from_pretrained loads it: the weights of the earlier save, without a word. huggingface_hub's load_torch_model loads
#   the index, so two libraries of one family read different models from one folder.
# Why it matters: a model that grows over max_shard_size, or a smaller max_shard_size, makes every later save into that
#   folder invisible.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 huggingface_hub==2.4.0 safetensors==0.8.0
cat > "$dir/job.py" <<'PY'
import os
import sys

import torch
import transformers
from huggingface_hub import load_torch_model
from transformers import LlamaConfig, LlamaForCausalLM

folder = sys.argv[1]
config = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
)
model = LlamaForCausalLM(config)
for value, size in ((1, "5GB"), (2, "8KB")):
    torch.nn.init.constant_(model.lm_head.weight, value)
    model.save_pretrained(folder, max_shard_size=size)
other = LlamaForCausalLM(config)
load_torch_model(other, folder, safe=True)
loaded = LlamaForCausalLM.from_pretrained(folder)
found = [int(one.lm_head.weight[0, 0].item()) for one in (loaded, other)]
print("transformers", transformers.__version__, "saved 1 in one file, then 2 in shards:")
print("\n".join(name for name in sorted(os.listdir(folder)) if "safetensors" in name))
print("from_pretrained loads", found[0], "and load_torch_model", found[1])
assert found == [1, 2], "transformers or huggingface_hub behaves otherwise now"
PY
HF_HUB_OFFLINE=1 "$dir/venv/bin/python" -W ignore "$dir/job.py" "$dir/saved" 2> "$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
