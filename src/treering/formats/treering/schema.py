"""The names of files in a checkpoint."""

import re

MANIFEST = "treering.json"
PIN = "pinned"  # an empty file beside the manifest: this checkpoint is never deleted
PART = "part-of-"  # and the identity of a manifest on another disk: see `host_parts`
_ARRAYS = re.compile(r"arrays-([0-9a-f]{6})-\d{5,}-of-\d{5,}\.safetensors")
_PART = re.compile(rf"{PART}([0-9a-f]{{16}})")
OWN_FILES = re.compile(
    rf"{_ARRAYS.pattern}|{_PART.pattern}|metrics-[0-9a-f]{{16}}-\d{{20}}-[0-9a-f]{{6}}\.json"
    r"|(treering|metrics)\.json\.[0-9a-f]{6}\.tmp"
)


def token_of(name: str) -> str | None:
    """The token in the name of an array file, which the files of one save have in common; None for other names."""
    found = _ARRAYS.fullmatch(name)
    return found and found[1]


def identity_of(name: str) -> str | None:
    """The identity in the name of a file that says of what there is a part; None for other names."""
    found = _PART.fullmatch(name)
    return found and found[1]
