"""The names of the files in a checkpoint, and the tokens in them."""

import re

MANIFEST = "treering.json"
PIN = "pinned"  # an empty file next to the manifest: this checkpoint is never deleted
_ARRAYS = re.compile(r"arrays-([0-9a-f]{6})-\d{5,}-of-\d{5,}\.safetensors")
METRICS = re.compile(r"metrics-([0-9a-f]{16})-([0-9]{20})-[0-9a-f]{6}\.json")  # an identity, and nanoseconds
_TEMPORARY = re.compile(r"(?:treering|metrics)\.json\.([0-9a-f]{6})\.tmp")
OWN_FILES = re.compile("|".join(pattern.pattern for pattern in (_ARRAYS, METRICS, _TEMPORARY)))


def token_of(name: str) -> str | None:
    """Returns the token in the name of an array file, or None for other names. All files of a save have one token."""
    found = _ARRAYS.fullmatch(name)
    return found and found[1]


def is_of_save(name: str) -> bool:
    """Returns True for a name of a file that a running save locks: an array file or a temporary manifest or metrics."""
    return bool(_ARRAYS.fullmatch(name) or _TEMPORARY.fullmatch(name))
