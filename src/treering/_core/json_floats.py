"""Writes floats that JSON cannot express, in JSON of any shape: as text, with a list of the places of these texts.

A place is a JSON Pointer (RFC 6901). Because of the list, no text of the user is mistaken for a float. A reader that
does not know the list finds text.
"""

import math
import re
from collections.abc import Iterable
from typing import Any

from .leaf_paths import key_text, split
from .values import decode_float, encode_float

_POINTER = re.compile("(?:/(?:[^~/]|~[01])*)*", re.DOTALL)
_INDEX = re.compile("0|[1-9][0-9]*")


def floats_to_text(value: Any, place: str, places: list[str]) -> Any:
    """Returns the value with text for every NaN and infinity in it. Appends their places to `places`."""
    if isinstance(value, dict):
        return {name: floats_to_text(part, f"{place}/{key_text(name)}", places) for name, part in value.items()}
    if isinstance(value, list):
        return [floats_to_text(part, f"{place}/{n}", places) for n, part in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        places.append(place)
        return encode_float(value)
    return value


def text_to_floats(value: Any, places: Iterable[str]) -> Any:
    """Undoes `floats_to_text`, in the value itself, and returns it.

    Raises `ValueError` if a place has no text of a float.
    """
    top: Any = {"": value}
    for place in places:
        part, key, text = top, "", None
        *outer, last = split(place)
        try:
            for name in outer:
                part = part[_key(part, name)]
            key = _key(part, last)
            text = part[key]
        except (LookupError, TypeError):
            pass
        if not isinstance(text, str) or not _POINTER.fullmatch(place):
            raise ValueError(f"expected the text of a float at {place!r:.100}, found {text!r:.100}")
        part[key] = decode_float(text)
    return top[""]


def _key(part: Any, name: str) -> Any:
    return int(name) if isinstance(part, list) and _INDEX.fullmatch(name) else name
