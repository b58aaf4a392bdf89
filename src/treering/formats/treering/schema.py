"""The names of files in a checkpoint."""

import re

MANIFEST = "treering.json"
PIN = "pinned"  # an empty file beside the manifest: this checkpoint is never deleted
PART = "part-of-"  # and the identity of a manifest on another disk: see `host_parts`
_ARRAYS = re.compile(r"arrays-([0-9a-f]{6})-\d{5,}-of-\d{5,}\.safetensors")
_PART = re.compile(rf"{PART}([0-9a-f]{{16}})")
METRICS = re.compile(r"metrics-([0-9a-f]{16})-([0-9]{20})-[0-9a-f]{6}\.json")  # an identity, and nanoseconds
_TEMPORARY = re.compile(r"(?:treering|metrics)\.json\.([0-9a-f]{6})\.tmp")
_KEYED = (_ARRAYS, _PART, METRICS, _TEMPORARY)
OWN_FILES = re.compile("|".join(pattern.pattern for pattern in _KEYED))


def token_of(name: str) -> str | None:
    """The token in the name of an array file, which the files of one save have in common; None for other names."""
    found = _ARRAYS.fullmatch(name)
    return found and found[1]


def key_of(name: str) -> str | None:
    """The token or the identity in the name of one of the `OWN_FILES`; None for other names."""
    return next((found[1] for pattern in _KEYED if (found := pattern.fullmatch(name))), None)


def is_of_save(name: str) -> bool:
    """Whether a file is one of those that whoever writes them holds while they are written."""
    return bool(_ARRAYS.fullmatch(name) or _TEMPORARY.fullmatch(name))


def identity_of(name: str) -> str | None:
    """The identity in the name of a file that says of what there is a part; None for other names."""
    found = _PART.fullmatch(name)
    return found and found[1]
