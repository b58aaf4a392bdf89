"""Keys as paths, and the text that Treering writes into `__metadata__`."""

import logging
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from ..._core.json_floats import as_floats
from ..._core.values import decode_float
from ..._threads.decoding import learn

_log = logging.getLogger("treering")

OWN = "treering"  # the key of `__metadata__` for what text by name cannot say
# Loaders of Hugging Face's refuse a file whose metadata names no library that they know, and transformers before 4.48
# fails without metadata: {"format": "pt"} is what they take without a conversion.
FORMAT = {"format": "pt"}


def path_of(key: str) -> str:
    """The path of a tensor."""
    return key.replace("~", "~0") if "~" in key and re.search("~(?![01])", key) else key


def key_of(path: str) -> str:
    """The key of a leaf, of which `path_of` makes its path again."""
    short = path.replace("~0", "~")
    return short if path_of(short) == path else path


class Sidecar(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The information that a checkpoint records beside its tree.

    `metadata_floats` are the places in `metadata` where floats are that JSON cannot write.
    `format` repeats the text of that name where the writer put that there, so that it is no metadata.
    """

    step: Annotated[int, msgspec.Meta(ge=0)] | None = None
    metrics: dict[str, float | str] = {}
    metadata: Any = None
    metadata_floats: list[str] = []
    format: str | None = None


learn(Sidecar)


def read_sidecar(text: Mapping[str, str]) -> Sidecar:
    """Step, metrics and metadata of a file, whichever program wrote it."""
    rest = {key: value for key, value in text.items() if key != OWN}
    try:
        beside = msgspec.json.decode(text.get(OWN, "{}"), type=Sidecar)
        for value in beside.metrics.values():
            decode_float(value)
        beside.metadata = as_floats(beside.metadata, beside.metadata_floats)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return Sidecar(metadata=dict(text))
    if beside.format is not None and rest.get("format") == beside.format:
        del rest["format"]
    if rest and beside.metadata is None:
        beside.metadata = rest
    elif rest and isinstance(beside.metadata, dict):  # what another program has added
        beside.metadata = {**rest, **beside.metadata}
    elif rest:
        _log.warning("text in `__metadata__` beside metadata that is no dict is left out: %s", ", ".join(sorted(rest)))
    return beside
