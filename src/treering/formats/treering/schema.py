"""The names of files in a checkpoint."""

import re

MANIFEST = "treering.json"
PIN = "pinned"  # an empty file beside the manifest: this checkpoint is never deleted
OWN_FILES = re.compile(
    r"arrays-[0-9a-f]{6}-\d{5,}-of-\d{5,}\.safetensors|metrics-[0-9a-f]{16}-\d{20}-[0-9a-f]{6}\.json"
    r"|(treering|metrics)\.json\.[0-9a-f]{6}\.tmp"
)
