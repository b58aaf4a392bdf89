"""Converts between keys and paths, and defines the text that Treering writes into `__metadata__`."""

import logging
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from ..._core.values import decode_float, text_to_floats
from ..._threads.preload_decoders import preload_decoders

_log = logging.getLogger("treering")

OWN = "treering"  # the key in `__metadata__` of everything that is not text by name
# Loaders of Hugging Face refuse a file whose metadata names no library they know, and transformers before 4.48 fails
# without metadata. They accept {"format": "pt"} without converting anything.
FORMAT = {"format": "pt"}


def path_of(key: str) -> str:
    """Returns the path of a tensor."""
    return key.replace("~", "~0") if "~" in key and re.search("~(?![01])", key) else key


def key_of(path: str) -> str:
    """Returns the key of a leaf; `path_of` turns it back into the path."""
    if "~" not in path:
        return path
    short = path.replace("~0", "~")
    return short if path_of(short) == path else path


class Sidecar(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What a checkpoint records in addition to its tree.

    `metadata_floats` lists the positions in `metadata` of floats that JSON cannot write.
    `format` repeats the text "format" if the writer added it: then it is not part of the metadata.
    """

    step: Annotated[int, msgspec.Meta(ge=0)] | None = None
    metrics: dict[str, float | str] = {}
    metadata: Any = None
    metadata_floats: list[str] = []
    format: str | None = None


preload_decoders(Sidecar)


def read_sidecar(text: Mapping[str, Any]) -> Sidecar:
    """Reads the step, metrics and metadata of a file that any program wrote; those of an index may be any JSON."""
    rest = {key: value for key, value in text.items() if key != OWN}
    try:
        sidecar = msgspec.json.decode(text.get(OWN, "{}"), type=Sidecar)
        for value in sidecar.metrics.values():
            decode_float(value)
        sidecar.metadata = text_to_floats(sidecar.metadata, sidecar.metadata_floats)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return Sidecar(metadata=dict(text))
    if sidecar.format is not None and rest.get("format") == sidecar.format:
        del rest["format"]
    if rest and sidecar.metadata is None:
        sidecar.metadata = rest
    elif rest and isinstance(sidecar.metadata, dict):  # another program has added text, or the config of an adapter
        if differ := sorted(key for key in rest if sidecar.metadata.get(key, rest[key]) != rest[key]):
            _log.warning("newer metadata than Treering recorded are used, those of %s", ", ".join(differ))
        sidecar.metadata = {**sidecar.metadata, **rest}
    elif rest:
        _log.warning(
            "text in `__metadata__` is left out, because the metadata is not a dict: %s", ", ".join(sorted(rest))
        )
    return sidecar
