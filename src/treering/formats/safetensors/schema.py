"""Keys as paths, and the text that Treering writes into `__metadata__`."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from ..._core.values import decode_float

OWN = "treering"  # the key of `__metadata__` for what text by name cannot say


def path_of(key: str) -> str:
    """The path of a tensor."""
    return key.replace("~", "~0") if "~" in key and re.search("~(?![01])", key) else key


def key_of(path: str) -> str:
    """The key of a leaf, of which `path_of` makes its path again."""
    short = path.replace("~0", "~")
    return short if path_of(short) == path else path


class Sidecar(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The information that a checkpoint records beside its tree."""

    step: Annotated[int, msgspec.Meta(ge=0)] | None = None
    metrics: dict[str, float | str] = {}
    metadata: Any = None


def read_sidecar(text: Mapping[str, str]) -> Sidecar:
    """Step, metrics and metadata of a file, whichever program wrote it."""
    rest = {key: value for key, value in text.items() if key != OWN}
    try:
        beside = msgspec.json.decode(text.get(OWN, "{}"), type=Sidecar)
        for value in beside.metrics.values():
            decode_float(value)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return Sidecar(metadata=dict(text))
    if rest and beside.metadata is None:
        beside.metadata = rest
    return beside
