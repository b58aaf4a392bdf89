"""Values as text, for messages between processes. Strings need not be valid Unicode, because paths need not be."""

import json
from typing import Any

import msgspec


def encode(value: Any) -> str:
    """Returns the JSON of a value that msgspec can encode."""
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # Python's JSON has escapes for lone surrogates, which stand for bytes of a path.
        return json.dumps(msgspec.to_builtins(value, str_keys=True))


def decode(text: str, type: Any = Any) -> Any:
    """Undoes `encode`. Raises `ValueError` or `msgspec.MsgspecError` for another text."""
    try:
        return msgspec.json.decode(text, type=type)
    except msgspec.DecodeError:
        if "\\ud" not in text:
            raise
        return msgspec.convert(json.loads(text), type, str_keys=True)
